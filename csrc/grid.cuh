/* Grids with a block for each piece of each head's work. gridDim.y ends at 65,535; further heads are layers in z. */
#ifndef KV_GRID_CUH
#define KV_GRID_CUH
#include "launch.cuh"
#include "ptx.cuh"

static inline dim3 grid_of(int64_t pieces, int64_t heads) {
  const int64_t width = heads < MOST_GRID_Y ? heads : MOST_GRID_Y;
  return dim3((unsigned)pieces, (unsigned)width, (unsigned)((heads + width - 1) / width));
}

/* Returns the head of this block, whose piece is blockIdx.x. In the last layer of z the head may not exist: such a
 * block must return at once. */
KV_DEVICE int block_head() { return (int)(blockIdx.z * gridDim.y + blockIdx.y); }
#endif
