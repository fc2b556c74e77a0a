"""The cost of each preset on top of plain chunked prefill:

    python tests/benchmarks/bench_cost.py [--tokens 8192] [--budget 512] [--policies NAME:OPTION=VALUE,... ...]

One process, one random 4-layer, hidden-512, 8/2-head fp32 Llama. A preset is compared with the same read (the same
chunk size) that keeps everything, alternating; medians. `read` is its time over the plain one's: below 1 if evicted
slots save more attention than choosing them costs. `choosing` is the time of drafting and of all work after a layer's
attention (scoring, selecting, moving slots, TADA's measurements), in % of the plain read. `token` is the time of a
decoded token over a token's after the plain read, with every slot. Each preset's budget is checked before it is timed.
Prints a table and one JSON line. CAOTE's table 6, overheads at one block size, is

    bench_cost.py --policies h2o:chunk_size=128 h2o+caote h2o+fastcaote tova:per_head=True,chunk_size=128 tova+caote
        tova+fastcaote snapkv:decode=True,interval=1,chunk_size=128 snapkv+caote snapkv+fastcaote
"""

import argparse
import json
import statistics

import torch
from bench_read import build

import kvevict
from kvevict import policy
from kvevict.lab.analysis import run
from kvevict.lab.analysis.compare import informed
from kvevict.policy import presets
from kvevict.policy.text import parse_policy

PLAIN = 2**30  # a budget above every prompt's length
STAGES = ("evict", "draft")
NEW = 33  # tokens decoded, the first one of the read included


def read(model, ids, chosen):
    """Seconds of a read, of its stages that choose, and of a decoded token; and the report."""
    alone = run.measure(model, None, ids, chosen, max_new_tokens=1)  # its stages are the read's only
    both = run.measure(model, None, ids, chosen, max_new_tokens=NEW)
    if both["new_tokens"] != NEW:
        raise SystemExit(f"{both['new_tokens']} tokens were decoded, not {NEW}")
    stages = alone["report"]["seconds"]
    choosing = sum(stages.get(stage, 0.0) for stage in STAGES)
    return alone["read_seconds"], choosing, both["decode_seconds"] / (NEW - 1), alone["report"]


def check(name, report, budget):
    kept = [n for layer in report["kept"] for n in layer[0]]
    most = budget * len(kept)
    if not 0.8 * most <= sum(kept) <= most:
        raise SystemExit(f"{name} kept {sum(kept)} slots of a budget of {most}; nothing was timed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    mine = [name for name in presets.PRESETS if not name.startswith("speckv")]  # their cost is the draft model's
    parser.add_argument("--policies", nargs="+", default=mine)
    args = parser.parse_args()
    model = build(args.tokens)
    ids = torch.randint(1000, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    response = ids[0, :32].tolist()  # any response costs an oracle the same
    learned = dict(lookahead=dict(adapter=kvevict.lookahead.Adapter(model)))
    policies = {}
    for text in args.policies:
        name, given = parse_policy(text)
        own = learned.get(name, {}) | given
        policies[text] = informed(policy.build(name, budget=args.budget, **own), response)
    sizes = {name: each.chunk_size for name, each in policies.items()}
    plain = {size: kvevict.Policy("knorm", budget=PLAIN, chunk_size=size, decode=False) for size in set(sizes.values())}
    for name, each in policies.items():
        check(name, read(model, ids, each)[3], args.budget)
    times = {key: [] for key in (*plain, *policies)}
    for _ in range(args.rounds):
        for key, each in (plain | policies).items():
            times[key].append(read(model, ids, each)[:3])
    median = {key: [statistics.median(column) for column in zip(*rows)] for key, rows in times.items()}
    print(f"{args.tokens} tokens, budget {args.budget}, median of {args.rounds}")
    width = max(map(len, policies))
    print(f"{'':{width}}{'chunk':>6}{'read':>8}{'choosing':>10}{'token':>8}")
    results = {}
    for name in policies:
        (total, choosing, token), base = median[name], median[sizes[name]]
        results[name] = dict(
            chunk_size=sizes[name], read=total / base[0], choosing=choosing / base[0], token=token / base[2]
        )
        numbers = f"{total / base[0]:8.2f}{choosing / base[0]:10.1%}{token / base[2]:8.2f}"
        print(f"{name:{width}}{sizes[name] or 'whole':>6}{numbers}")
    print(json.dumps({"bench": "cost", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
