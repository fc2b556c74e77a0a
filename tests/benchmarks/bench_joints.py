"""Two versions of the package against each other: time of a decoded token at a budget, and of a read.

    python tests/benchmarks/bench_joints.py OLD_TREE NEW_TREE [--tokens 16384] [--budget 512] [--rounds 15]

A tree is a checkout with a built `kvevict/_C`. Each has one process with the same random 4-layer, hidden-512, 8/2-head
fp32 Llama; only one computes at a time, and they alternate within a round, the first one changing. First both must
write the same tokens. `token` is a decoded token's time after `--tokens` tokens of which the budget is kept, `read`
the time to read them; medians in ms, and the median over rounds of new / old with its 95 % bootstrap interval. `calls`
are Python function calls per decoded token: all of them, and those of kvevict's own functions. Prints a table and one
JSON line.
"""

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

POLICIES = ["take+edie", "snapkv", "h2o"]
UNPATCHED = "unpatched"


# -- a process of one tree ---------------------------------------------------------------------------------------------


class Worker:
    """A model, and per policy the cache of what was read."""

    def __init__(self, tokens, budget, threads):
        import torch
        from bench_read import build

        torch.set_num_threads(threads or torch.get_num_threads())
        torch.set_grad_enabled(False)
        self.model, self.budget, self.read_caches = build(tokens), budget, {}
        self.ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(1))

    def read(self, policy, tokens=None):
        """Seconds of a read."""
        import kvevict

        kvevict.unpatch(self.model)
        if policy != UNPATCHED:
            kvevict.patch(self.model, policy, budget=self.budget)
        start = time.perf_counter()
        out = self.model(self.ids[:, :tokens], logits_to_keep=1, use_cache=True)
        seconds = time.perf_counter() - start
        self.read_caches[policy] = out.past_key_values, out.logits.argmax(-1)
        return seconds

    def _decoded(self, policy, new):
        """Tokens decoded after a copy of what was read, and seconds per token."""
        import kvevict

        kvevict.unpatch(self.model)
        if policy != UNPATCHED:
            kvevict.patch(self.model, policy, budget=self.budget)
        cache, token = copy.deepcopy(self.read_caches[policy])
        made, start = [], time.perf_counter()
        for _ in range(new):
            token = self.model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)
            made.append(token)
        seconds = (time.perf_counter() - start) / new
        return [int(each) for each in made], seconds

    def tokens(self, policy, new):
        return self._decoded(policy, new)[0]

    def token(self, policy, new):
        return self._decoded(policy, new)[1]

    def calls(self, policy, new):
        """Python calls per decoded token: of all functions, and of kvevict's."""
        import kvevict

        counts, own = [0, 0], str(Path(kvevict.__file__).parent)

        def note(frame, event, _):
            if event == "call":
                counts[0] += 1
                counts[1] += frame.f_code.co_filename.startswith(own)

        def count(tokens):
            counts[:] = 0, 0
            sys.setprofile(note)
            try:
                self._decoded(policy, tokens)
            finally:
                sys.setprofile(None)
            return list(counts)

        few, many = count(1), count(1 + new)  # patching and copying are in both
        return [(b - a) / new for a, b in zip(few, many, strict=True)]


def serve(options):
    """Answer lines of [method, arguments] on stdin until it ends."""
    worker, out = Worker(*options), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, method)(*arguments)), file=out, flush=True)


# -- the two of them ---------------------------------------------------------------------------------------------------


class Tree:
    """A worker's process."""

    def __init__(self, path, options):
        path = Path(path).resolve()
        if not (path / "kvevict" / "__init__.py").is_file():
            raise SystemExit(f"{path} has no kvevict: give the root of a checkout")
        call = [sys.executable, __file__, "--serve", json.dumps(options)]
        self.path, env = path, os.environ | dict(PYTHONPATH=str(path))
        self.process = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, *request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.path}: {request} failed; its error is above")
        return json.loads(line)


def interval(ratios, samples=4000):
    """Median of ratios and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(samples))
    return statistics.median(ratios), medians[samples // 40], medians[-1 - samples // 40]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="TREE")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded per round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--reads", type=int, default=7, help="rounds that read too")
    parser.add_argument("--threads", type=int, default=0, help="torch's own number if 0")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    if len(args.trees) != 2:
        parser.error("give two trees, the old one first")
    trees, new = [Tree(path, (args.tokens, args.budget, args.threads)) for path in args.trees], args.new_tokens
    for policy in args.policies:
        for tree in trees:
            tree.ask("read", policy)
        old, other = (tree.ask("tokens", policy, new) for tree in trees)
        if old != other:
            first = next(i for i, pair in enumerate(zip(old, other, strict=True)) if pair[0] != pair[1])
            raise SystemExit(f"{policy}: token {first} differs, {old[first]} and {other[first]}; nothing was timed")
    times = {(policy, what): ([], []) for policy in args.policies for what in ("token", "read")}
    for turn in range(max(args.rounds, args.reads)):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        for (policy, what), (mine, theirs) in times.items():
            if turn < (args.reads if what == "read" else args.rounds):
                for which in order:
                    (mine, theirs)[which].append(trees[which].ask(what, policy, *((new,) if what == "token" else ())))
    results = {}
    print(f"{args.tokens} tokens, budget {args.budget}, {args.rounds} rounds of {new} tokens, {args.reads} reads")
    print(f"{'':24}{'old ms':>10}{'new ms':>10}{'new/old':>9}   95 %")
    for (policy, what), pair in times.items():
        ratio = interval([b / a for a, b in zip(*pair, strict=True)])
        old, other = (1000 * statistics.median(each) for each in pair)
        results[f"{policy} {what}"] = dict(old_ms=old, new_ms=other, ratio=ratio)
        print(f"{policy + ' ' + what:24}{old:10.3f}{other:10.3f}{ratio[0]:9.3f}   {ratio[1]:.3f} to {ratio[2]:.3f}")
    print(f"{'calls a token':24}{'old':>10}{'new':>10}   of them kvevict's: old, new")
    for policy in (UNPATCHED, *args.policies):
        for tree in trees if policy == UNPATCHED else ():
            tree.ask("read", policy, 300)
        (a, own_a), (b, own_b) = (tree.ask("calls", policy, 16) for tree in trees)
        results[f"{policy} calls"] = dict(old=a, new=b, old_own=own_a, new_own=own_b)
        print(f"{policy:24}{a:10.1f}{b:10.1f}   {own_a:.1f}, {own_b:.1f}")
    print(json.dumps({"bench": "joints", "trees": args.trees, "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
