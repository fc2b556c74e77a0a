#!/bin/sh
# Compiles the CUDA kernels for a CPU and runs the ops' tests on them:
#   run.sh plain|asan|race [pytest's options]     such as: run.sh race -k 'test_attend and matches'
# build.py describes the modes. asan and race take about ten times as long as plain.
set -eu
mode=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python "$here/build.py" "$mode" "$out"
export KV_ON_CPU_USAGE="$out/usage"

# Fresh memory holds a pattern, so that memory that no kernel wrote does not pass. Python's own leaks are ignored.
export MALLOC_PERTURB_=1
if [ "$mode" = asan ]; then
  export ASAN_OPTIONS=detect_leaks=0:max_malloc_fill_size=1000000000:malloc_fill_byte=254
  preload=$("${CXX:-g++}" -print-file-name=libasan.so):$("${CXX:-g++}" -print-file-name=libubsan.so)
fi
cd "$here/../.."
tests() { # pytest's arguments
  # Not from the current directory, where the package has the CPU's kernels. File descriptors are not captured, so that
  # a message that ends the process reaches the terminal.
  PYTHONSAFEPATH=1 PYTHONPATH="$out" LD_PRELOAD="${preload:-}" python -m pytest -q -p no:cacheprovider --capture=sys "$@"
}
files="tests/ops/test_packed.py --deselect $(find tests -name test_attend.py)::test_isa" # which chooses among the CPU's
for source in csrc/*_cuda.cu; do
  files="$files $(find tests -name "test_$(basename "$source" _cuda.cu).py")" # kl_grad is tested with kl
done
tests "$@" $files
python "$here/usage.py" "$KV_ON_CPU_USAGE"
# score on Hopper; perhaps none of its tests are asked for.
export KVEVICT_WGMMA=1 KV_ON_CPU_USAGE="$out/usage_sm90"
if tests "$@" tests/ops/test_score.py; then
  python "$here/usage.py" "$KV_ON_CPU_USAGE"
else
  [ $? = 5 ]
fi
