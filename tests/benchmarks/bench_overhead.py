"""What patching costs when nothing is evicted:

    python tests/benchmarks/bench_overhead.py [--tokens 4096] [--new-tokens 64]

One process, one random 4-layer, hidden-512, 8/2-head fp32 Llama; unpatched and patched generations alternate and the
medians are compared. First the logits are checked to be the same. Prints a table and one JSON line.
"""

import json

import torch
from bench_read import arguments, build

from kvevict.lab.analysis import speed
from kvevict.policy import building


def main():
    args = arguments(__doc__, tokens=4096, new_tokens=64, rounds=5, policies=["snapkv", "h2o", "take"])
    model = build(args.tokens)
    ids = torch.randint(1000, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    policies = {name: building.choose(name, budget=args.tokens + args.new_tokens) for name in args.policies}
    speed.check(model, ids, policies)
    print(f"{args.tokens} tokens read, {args.new_tokens} decoded, median of {args.rounds} (s)")
    result = {}
    for name, row in speed.alternate(model, ids, policies, args.new_tokens, args.rounds).items():
        decode = (args.new_tokens - 1) / row["decode_tokens_per_second"]
        result[name] = dict(read=row["read_seconds"], decode=decode)
        ratios = [value / result[speed.UNPATCHED][stage] for stage, value in result[name].items()]
        print(f"{name:12} read {row['read_seconds']:7.3f} ({ratios[0]:.3f})   decode {decode:7.3f} ({ratios[1]:.3f})")
    print(json.dumps({"bench": "overhead", "threads": torch.get_num_threads(), "results": result}))


if __name__ == "__main__":
    main()
