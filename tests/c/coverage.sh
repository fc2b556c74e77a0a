#!/usr/bin/env bash
# Line and branch coverage of csrc/*.c by the C tests and the op tests together, in a scratch folder:
# coverage.sh [PYTEST ARGUMENTS instead of tests/ops]. Needs gcc with gcov, and pip install gcovr.
#
# The kernels are compiled once per instruction set, as in the extension; a line counts if any of them ran it.
set -euo pipefail
. "$(dirname "$0")/../lib/scratch_build.sh"
scratch_build --coverage
objects=$(find build -name '*.o' ! -name 'binding*' -printf "$out/%p ")
for test in tests/c/test_*.c; do
  gcc -std=c11 -O1 --coverage -I csrc "$test" $objects -lm -lpthread -o ctest
  ./ctest
done
export PYTHONPATH=$out
python -m pytest -q -n0 "${@:-tests/ops}" # with the machine's best instruction set, and then with the others
for isa in scalar avx2 avx512; do
  KVEVICT_CPU_ISA=$isa python -m pytest -q -n0 tests/ops -k "fuzz or matches and dtype1"
done
for branches in "" --txt-metric=branch; do
  gcovr --root . --filter 'csrc/.*\.[ch]$' --merge-mode-functions=separate --gcov-ignore-errors=all $branches
done
