"""Threads and asyncio tasks on two models for minutes (tests/lib/stress.py): every result a lone run's, memory flat.

    python tests/benchmarks/stress_threads.py --minutes 10

Prints a line per round (things done, caches that are alive after it, resident memory), then one JSON line. Exits with
an error where a result differs, a model is not as before, a cache is left over, or the median memory of the last half
of the rounds is by more than --slack above the first half's.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

import stress

from kvevict.engine.adopt import EvictionCache


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def caches() -> int:
    gc.collect()
    return sum(issubclass(type(each), EvictionCache) for each in gc.get_objects())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--interval", type=float, default=1e-5, help="seconds between switches of threads")
    parser.add_argument("--slack", type=float, default=8, help="MB that memory may grow by")
    args = parser.parse_args()
    torch.set_num_threads(1)
    nets, rounds = [stress.Net(0), stress.Net(1)], []
    held, start = caches(), time.monotonic()
    for number in range(args.rounds):
        left = (args.minutes * 60 - (time.monotonic() - start)) / (args.rounds - number)
        done = stress.together(nets, args.threads, args.tasks, left, args.interval, number)
        alive, size = caches(), resident()
        rounds.append((alive, size, done))
        print(f"{time.monotonic() - start:7.0f} s  {done:6d} done  {alive} caches  {size / 1e6:.1f} MB", flush=True)
    half = len(rounds) // 2
    first, last = (statistics.median(size for _, size, _ in part) / 1e6 for part in (rounds[:half], rounds[half:]))
    as_before = all(net.is_as_before() for net in nets)
    result = dict(seconds=round(time.monotonic() - start), done=sum(done for *_, done in rounds), as_before=as_before,
                  caches=[held, rounds[-1][0]], first_half_mb=round(first, 1), last_half_mb=round(last, 1))  # fmt: skip
    print(json.dumps(result))
    if not as_before or rounds[-1][0] > held or last - first > args.slack:
        sys.exit("a model is not as before, caches are left over, or memory grew")


if __name__ == "__main__":
    main()
