/* The only function that launches kernels. */
#ifndef KV_LAUNCH_CUH
#define KV_LAUNCH_CUH
#include <cuda_runtime.h>
#include <stdint.h>

constexpr int64_t MOST_GRID_Y = 65535; /* CUDA's limit on gridDim.y and gridDim.z */

/* Launches kernel(args...) on `stream` of the current device, without waiting. threads: of a block, a multiple of 32;
 * shared: bytes of dynamic shared memory. Returns 0, or the CUDA error of a launch that failed. */
template <auto kernel, class... Args>
static int launch(dim3 grid, int threads, size_t shared, void *stream, Args... args) {
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
  return (int)cudaLaunchKernelEx(&config, kernel, args...);
}
#endif
