"""What each preset costs on top of plain chunked prefill:

    python tests/benchmarks/bench_cost.py [--tokens 8192] [--budget 512]

One process, one random 4-layer, hidden-512, 8/2-head fp32 Llama. A preset is compared with the same read (the same
chunk size) that keeps everything, taking turns; medians. `read` is its time over the plain one's: below 1 where evicted
slots save more attention than choosing them costs. `choosing` is all that happens after a layer's attention (scoring,
selecting, moving slots, what TADA measures) and drafting, in % of the plain read. Before a preset is timed, it is
checked that it keeps its budget. Prints a table and one JSON line.
"""

import argparse
import json
import statistics

import torch
from bench_read import build

import kvevict
from kvevict import policy
from kvevict.analysis import run
from kvevict.analysis.compare import informed
from kvevict.policy import presets

PLAIN = 2**30  # a budget that nothing reaches
STAGES = ("evict", "draft")


def read(model, ids, chosen):
    """Seconds of a read, and of its stages that choose."""
    seconds = run.measure(model, None, ids, chosen, max_new_tokens=1)
    stages = seconds["report"]["seconds"]
    return seconds["read_seconds"], sum(stages.get(stage, 0.0) for stage in STAGES), seconds["report"]


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
    mine = [name for name in presets.PRESETS if not name.startswith("speckv")]  # which cost what their draft model does
    parser.add_argument("--policies", nargs="+", default=mine)
    args = parser.parse_args()
    model = build(args.tokens)
    ids = torch.randint(1000, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    response = ids[0, :32].tolist()  # which costs an oracle what any other would
    learned = dict(lookahead=dict(adapter=kvevict.lookahead.Adapter(model)))
    policies = {
        name: informed(policy.build(name, budget=args.budget, **learned.get(name, {})), response)
        for name in args.policies
    }
    sizes = {name: each.chunk_size for name, each in policies.items()}
    plain = {size: kvevict.Policy("knorm", budget=PLAIN, chunk_size=size, decode=False) for size in set(sizes.values())}
    for name, each in policies.items():
        check(name, read(model, ids, each)[2], args.budget)
    times = {key: [] for key in (*plain, *policies)}
    for _ in range(args.rounds):
        for key, each in (plain | policies).items():
            times[key].append(read(model, ids, each)[:2])
    median = {key: [statistics.median(column) for column in zip(*rows)] for key, rows in times.items()}
    print(f"{args.tokens} tokens, budget {args.budget}, median of {args.rounds}")
    print(f"{'':22}{'chunk':>6}{'read':>8}{'choosing':>10}")
    results = {}
    for name in policies:
        (total, choosing), base = median[name], median[sizes[name]][0]
        results[name] = dict(chunk_size=sizes[name], read=total / base, choosing=choosing / base)
        print(f"{name:22}{sizes[name] or 'whole':>6}{total / base:8.2f}{choosing / base:10.1%}")
    print(json.dumps({"bench": "cost", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
