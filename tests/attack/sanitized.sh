#!/usr/bin/env bash
# The random op calls of test_every_op.py, or the pytest arguments given, on an extension built with the address and
# undefined-behaviour sanitizers in a scratch folder: sanitized.sh [ARGUMENTS]. KVEVICT_FUZZ and KVEVICT_SEED as in
# tests/lib/fuzzing.py; KVEVICT_CPU_ISA=scalar, avx2 or avx512 chooses the kernels. Needs gcc.
set -euo pipefail
. "$(dirname "$0")/../lib/scratch_build.sh"
scratch_build "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# torch and Python leak on purpose; both libraries come before torch, which may bring copies of its own.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" PYTHONPATH=$out
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
python -m pytest -q -n0 -s "${@:-tests/attack/test_every_op.py}"
