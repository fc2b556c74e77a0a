"""python usage.py FILE: the kernels' use of shared memory, by op, from the lines that ops.cpp wrote to FILE.

More than the file's budget is an error. Conflicts: bank conflicts per 8x8 matrix of ldmatrix; each costs a cycle."""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

from build import CSRC


def budget_of(op: str) -> int:
    """The most bytes of shared memory of a kernel's block, as the op's file has it."""
    file = CSRC / f"{op}_sm90.cu"
    if not file.exists() or os.environ.get("KVEVICT_WGMMA") != "1":
        file = CSRC / f"{op}_cuda.cu"
    return int(re.search(r"budget: regs \d+, smem (\d+)", file.read_text())[1])


def main():
    shared, matrices, conflicts = defaultdict(int), defaultdict(int), defaultdict(int)
    for line in Path(sys.argv[1]).read_text().splitlines():
        op, *numbers = line.split()
        shared[op] = max(shared[op], int(numbers[0]))
        matrices[op] += int(numbers[1])
        conflicts[op] += int(numbers[2])
    over = False
    print(f"{'op':<12} {'shared':>7} {'budget':>7} {'conflicts':>9}")
    for op in sorted(shared):
        # attend_score, attend_error and attend_peak call the kernels of both ops of their names.
        budget = max(map(budget_of, op.split("_") if op.startswith("attend_") else [op]))
        rate = f"{conflicts[op] / matrices[op]:.3f}" if matrices[op] else "-"
        print(f"{op:<12} {shared[op]:>7} {budget:>7} {rate:>9}")
        over |= shared[op] > budget
    sys.exit("more shared memory than the budget" if over else 0)


if __name__ == "__main__":
    main()
