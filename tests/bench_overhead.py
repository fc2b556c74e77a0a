"""What patching costs when nothing is evicted: `python tests/bench_overhead.py [--tokens 4096] [--new-tokens 64]`.

One process, one random 4-layer, hidden-512, 8/2-head fp32 Llama; unpatched and patched generations alternate and the
medians are compared. The tokens are checked to be the same first. Prints a table and one JSON line.
"""

import argparse
import json
import statistics

import torch
from bench_read import build

import kvevict
from kvevict.run import measure


class NoTokenizer:
    def decode(self, ids, **options):
        return ids.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=["snapkv", "h2o", "take"])
    args = parser.parse_args()
    model = build(args.tokens)
    ids = torch.randint(1000, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    budget = args.tokens + args.new_tokens
    names = ["unpatched", *args.policies]
    runs = {name: [] for name in names}
    for _ in range(args.rounds + 1):
        for name in names:
            policy = None if name == "unpatched" else kvevict.policy.build(name, budget=budget)
            runs[name].append(measure(model, NoTokenizer(), ids, policy, args.new_tokens))
    want = runs["unpatched"][0]["answer"]
    assert all(run["answer"] == want for name in names for run in runs[name]), (
        "tokens differ from the unpatched model's"
    )
    result = {}
    print(f"{args.tokens} tokens read, {args.new_tokens} decoded, median of {args.rounds} (s)")
    for name in names:
        read, decode = (statistics.median(r[k] for r in runs[name][1:]) for k in ("read_seconds", "decode_seconds"))
        result[name] = dict(read=read, decode=decode)
        ratios = [value / result["unpatched"][stage] for stage, value in result[name].items()]
        print(f"{name:12} read {read:7.3f} ({ratios[0]:.3f})   decode {decode:7.3f} ({ratios[1]:.3f})")
    print(json.dumps({"bench": "overhead", "threads": torch.get_num_threads(), "results": result}))


if __name__ == "__main__":
    main()
