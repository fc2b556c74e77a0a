/* The only functions that launch kernels. */
#ifndef KV_LAUNCH_CUH
#define KV_LAUNCH_CUH
#include <cuda_runtime.h>
#include <stdint.h>

constexpr int64_t MOST_GRID_Y = 65535; /* CUDA's limit on gridDim.y and gridDim.z */

template <auto kernel, class... Args>
static int launch_with(bool early, dim3 grid, int threads, size_t shared, void *stream, Args... args) {
  if (shared > 48 * 1024) {
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), limit, (int)shared);
    if (error != cudaSuccess) return (int)error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = shared;
  config.stream = (cudaStream_t)stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = early;
  return (int)cudaLaunchKernelEx(&config, kernel, args...);
}

/* Launches kernel(args...) on `stream` of the current device, without waiting. A block has `threads` threads, a
 * multiple of 32, and `shared` bytes of dynamic shared memory. Returns 0, or the CUDA error of a launch that failed. */
template <auto kernel, class... Args>
static int launch(dim3 grid, int threads, size_t shared, void *stream, Args... args) {
  return launch_with<kernel>(false, grid, threads, shared, stream, args...);
}

/* Launches as launch() does, for a kernel that calls await_kernels_before: where it is compiled for sm_90 or later,
 * its blocks may start while the stream's previous kernel still runs. */
template <auto kernel, class... Args>
static int launch_early(dim3 grid, int threads, size_t shared, void *stream, Args... args) {
  cudaFuncAttributes made = {};
  const cudaError_t error = cudaFuncGetAttributes(&made, reinterpret_cast<const void *>(kernel));
  if (error != cudaSuccess) return (int)error;
  const bool can_wait = made.ptxVersion >= 90;
  return launch_with<kernel>(can_wait, grid, threads, shared, stream, args...);
}
#endif
