"""One machine's seconds and memory before a change and after it:

    python tests/benchmarks/bench_checkouts.py BEFORE AFTER [--runs ...] [--length 4096] [--new-tokens 64] [--rounds 5]

BEFORE and AFTER are folders of two checkouts with their extension built. The runs are bench_read.py's, each a fresh
process, which checks its logits before it is timed; the checkouts take turns. Prints the medians of AFTER, and their
ratios to those of BEFORE, of reading, of a decoded token and of the peak memory's growth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = [f"{p}:budget=512,chunk_size=1024" for p in ("take+edie", "snapkv", "h2o", "streaming")]
MEASURED = dict(read_seconds="read s", decode_seconds="decode s", growth_mib="growth MiB")


def measure(folder, run, args) -> dict:
    script = Path(folder).resolve() / "tests/benchmarks/bench_read.py"
    call = [sys.executable, script, "--one", run, str(args.length), "--new-tokens", str(args.new_tokens)]
    environment = os.environ | dict(PYTHONPATH=str(Path(folder).resolve()))
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{run} of {folder} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for run in args.runs:
        found: dict = {folder: [] for folder in (args.before, args.after)}
        for number in range(args.rounds):
            for folder in list(found)[:: 1 if number % 2 else -1]:
                found[folder].append(measure(folder, run, args))
        print(f"{run:40}", end="")
        for name, title in MEASURED.items():
            before, after = (statistics.median(each[name] for each in found[f]) for f in (args.before, args.after))
            print(f"  {title} {after:.3f} ({after / before:.3f})", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
