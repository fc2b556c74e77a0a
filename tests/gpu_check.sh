#!/usr/bin/env bash
# Everything that needs a GPU, in less than 8 minutes: gpu_check.sh [FOLDER]. Builds the package for the GPU that is there,
# runs the ops' tests and test_gpu.py, the kernels under compute-sanitizer if it is installed, and the benchmark; leaves
# the outputs, bench.txt and bench.json in FOLDER ($OUT if it is set, else gpu_check/). Goes on after a failure and ends
# with a table; its exit status is 0 if all steps passed. Needs nvcc, torch with CUDA, Transformers, safetensors, tqdm,
# pytest and pytest-xdist. Not yet run on a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-${OUT:-gpu_check}}")
mkdir -p "$out"
: >"$out/steps.txt"

# step NAME SECONDS COMMAND...: the command's output goes to NAME.txt
step() {
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  printf '== %4d s  %s\n' "$SECONDS" "$name"
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  printf '%-12s %-16s %4d s\n' "$name" "$([ $status = 0 ] && echo passed || echo "FAILED ($status)")" \
    "$((SECONDS - start))" | tee -a "$out/steps.txt"
  [ $status = 0 ] || tail -n 25 "$out/$name.txt"
}

gpu=$(python -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || exit 1
export KVEVICT_CUDA=1 KVEVICT_CUDA_ARCHS=${KVEVICT_CUDA_ARCHS:-$gpu} PYTHONPATH=$PWD
nvidia-smi >"$out/nvidia-smi.txt" 2>&1 || true
ops=(tests/test_{attend,score,peak,error,refine,norm,select,compact,decode}.py)

step build 180 python setup.py build_ext --inplace
step tests 150 python -m pytest -q -n 4 -k "cuda or gpu" "${ops[@]}" tests/test_gpu.py
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    step "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      python -m pytest -q -o addopts= -x tests/test_gpu.py -k repeats
  done
fi
step bench 120 python tests/bench_ops.py --device cuda
grep -v '^{' "$out/bench.txt" | tee "$out/bench_table.txt"
tail -n 1 "$out/bench.txt" >"$out/bench.json"
printf '\n== %d s in all\n' "$SECONDS"
cat "$out/steps.txt"
! grep -q FAILED "$out/steps.txt"
