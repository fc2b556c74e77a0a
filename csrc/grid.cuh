/* Makes grids with one block for each piece of each head's work. x counts pieces; y and z together count heads,
 * since CUDA limits gridDim.y to 65,535. */
#ifndef KV_GRID_CUH
#define KV_GRID_CUH
#include "launch.cuh"
#include "ptx.cuh"

static inline dim3 grid_of(int64_t pieces, int64_t heads) {
  const int64_t width = heads < MOST_GRID_Y ? heads : MOST_GRID_Y;
  return dim3((unsigned)pieces, (unsigned)width, (unsigned)((heads + width - 1) / width));
}

/* Returns the head of this block in a grid from grid_of; blockIdx.x is its piece. In the last layer of z there may
 * be no such head: the block must then return at once. */
KV_DEVICE int block_head() { return (int)(blockIdx.z * gridDim.y + blockIdx.y); }
#endif
