#!/usr/bin/env bash
# Everything that needs a GPU, in at most 8 minutes, what shows most first: gpu_check.sh [FOLDER]. Builds the package for
# the machine's GPU, runs test_gpu.py (caches, recordings, answers, recall), the benchmark, the ops' tests, and the
# kernels under compute-sanitizer if it is installed; writes at most nine files to FOLDER ($OUT if it is set, else
# gpu_check/): the outputs, bench.json and the table steps.txt.
# Continues after a failure; its exit status is 0 if all steps passed. Needs nvcc, torch with CUDA,
# Transformers, safetensors, tqdm and pytest; pytest-xdist makes it faster.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:-${OUT:-gpu_check}}")
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv,noheader >"$out/steps.txt" || exit 1

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

gpu=$(python3 -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || exit 1
# Sums are compared with those of matrix products in full fp32.
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
export KVEVICT_CUDA=1 KVEVICT_CUDA_ARCHS=${KVEVICT_CUDA_ARCHS:-$gpu} PYTHONPATH=$PWD
workers=$(python3 -c 'import xdist; print("-n 8")' 2>/dev/null)
ops=()
for source in csrc/*_cuda.cu; do
  mapfile -t -O "${#ops[@]}" ops < <(find tests/ops -name "test_$(basename "$source" _cuda.cu).py")
done
ops+=(tests/ops/test_packed.py)

# The steps' limits are 480 seconds in all.
step build 110 python3 setup.py build_ext --inplace
python3 -c 'from kvevict.ops import _ops; assert _ops.build_info()["cuda"], "the build has no CUDA kernels"' || exit 1
step engine 70 python3 -m pytest -q -o addopts= $workers tests/cuda/test_gpu.py
step bench 100 python3 tests/benchmarks/bench_ops.py --device cuda
step ops 90 python3 -m pytest -q -o addopts= $workers -k "cuda or gpu" "${ops[@]}"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    # Each tensor has its own allocation, so that memory after it is not another tensor's.
    step "$tool" 35 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 \
      python3 -m pytest -q -o addopts= -x tests/cuda/test_gpu.py -k repeats
  done
fi
if [ "$gpu" = 90 ]; then # score by wgmma, which is off otherwise
  step wgmma 20 env KVEVICT_WGMMA=1 python3 -m pytest -q -o addopts= $workers -k "cuda or gpu" tests/ops/test_score.py
  step bench_wgmma 20 env KVEVICT_WGMMA=1 \
    python3 tests/benchmarks/bench_ops.py --device cuda --only "(attend|window).* 4096,"
fi
grep -hv '^{' "$out"/bench*.txt
grep '^{"machine"' "$out/bench.txt" >"$out/bench.json"
printf '\n== %d s in all\n' "$SECONDS"
cat "$out/steps.txt"
! grep -q FAILED "$out/steps.txt"
