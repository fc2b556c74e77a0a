#!/usr/bin/env bash
# The random op calls of test_every_op.py, or the pytest arguments given, on an extension built with the address and
# undefined-behaviour sanitizers in a scratch folder: sanitized.sh [ARGUMENTS]. KVEVICT_FUZZ and KVEVICT_SEED as in
# tests/lib/fuzzing.py; KVEVICT_CPU_ISA=scalar, avx2 or avx512 chooses the kernels. Needs gcc.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cp -r "$root"/{csrc,kvevict,tests,setup.py,pyproject.toml,README.md,LICENSE} "$out"
cd "$out"
flags="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
CC=gcc CXX="g++ $flags" CFLAGS=$flags KVEVICT_CUDA=0 python setup.py -q build_ext --inplace >build.log 2>&1 ||
  { tail -20 build.log >&2; exit 1; }
# torch and Python leak on purpose; both libraries come before torch, which may bring copies of its own.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" PYTHONPATH=$out
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
python -m pytest -q -n0 -s "${@:-tests/attack/test_every_op.py}"
