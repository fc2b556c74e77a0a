#!/usr/bin/env bash
# Line and branch coverage of csrc/*.c, measured by the C tests and the op tests together in a scratch folder:
# coverage.sh [PYTEST ARGUMENTS in the place of tests/ops]. Needs gcc with gcov, and pip install gcovr.
#
# The kernels are compiled once per instruction set, as in the extension; a line counts where any of them ran it.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cp -r "$root"/{csrc,kvevict,tests,setup.py,pyproject.toml,README.md,LICENSE} "$out"
cd "$out"
flags="-O1 -g --coverage"
CC=gcc CXX="g++ --coverage" CFLAGS=$flags KVEVICT_CUDA=0 python setup.py -q build_ext --inplace >build.log 2>&1 ||
  { tail -20 build.log >&2; exit 1; }
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
