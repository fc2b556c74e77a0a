/* One block for each piece of each head's work. gridDim.y ends at 65,535, so further heads are layers in z. */
#ifndef KV_GRID_CUH
#define KV_GRID_CUH
#include "launch.cuh"

static inline dim3 grid_of(int64_t pieces, int64_t heads) {
  const int64_t width = heads < MOST_GRID_Y ? heads : MOST_GRID_Y;
  return dim3((unsigned)pieces, (unsigned)width, (unsigned)((heads + width - 1) / width));
}

/* The head of this block, whose piece is blockIdx.x. In the last layer it may be beyond the number of heads: such a
 * block has nothing to do and must return. */
static __device__ __forceinline__ int block_head() { return (int)(blockIdx.z * gridDim.y + blockIdx.y); }
#endif
