/* Reductions over the lanes of a warp and the warps of a block. Every sum has a fixed order, so results repeat bit for
 * bit. All lanes of a warp (all threads of a block) must call a function together, and all get its result. A block has
 * a multiple of 32 threads, at most 1024. */
#ifndef KV_WARP_CUH
#define KV_WARP_CUH
#include "ptx.cuh"

constexpr uint32_t ALL_LANES = 0xffffffffu;

KV_DEVICE int lane_id() { return threadIdx.x % 32; }
KV_DEVICE int warp_id() { return threadIdx.x / 32; }

/* Returns the sum over each aligned group of Width lanes: 4 lanes hold a row of an mma fragment, 32 are the warp.
 * All lanes of a group get the same bits. */
template <int Width = 32, class T>
KV_DEVICE T lanes_sum(T x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
  return x;
}
/* Returns the largest number of each aligned group of Width lanes; ignores NaN, as fmaxf does. */
template <int Width = 32>
KV_DEVICE float lanes_max(float x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}
/* Returns the sum over the warp's lanes before this one. */
KV_DEVICE int lanes_sum_before(int x) {
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(ALL_LANES, sum, step);
    if (lane_id() >= step) sum += left;
  }
  return sum - x;
}

/* Returns the sum over a block's threads. scratch [32]: in shared memory, free again when this returns. */
template <class T>
KV_DEVICE T block_sum(T x, T *scratch) {
  x = lanes_sum(x);
  if (lane_id() == 0) scratch[warp_id()] = x;
  __syncthreads();
  x = lanes_sum(lane_id() < (int)blockDim.x / 32 ? scratch[lane_id()] : T(0));
  __syncthreads();
  return x;
}
/* Returns the sum over the block's threads before this one; *total becomes the sum over all. scratch [32]: in shared
 * memory, free again when this returns. */
KV_DEVICE int block_sum_before(int x, int *scratch, int *total) {
  const int before = lanes_sum_before(x);
  if (lane_id() == 31) scratch[warp_id()] = before + x;
  __syncthreads();
  const int warp_total = lane_id() < (int)blockDim.x / 32 ? scratch[lane_id()] : 0;
  const int warps_before = lanes_sum_before(warp_total);
  *total = __shfl_sync(ALL_LANES, warps_before + warp_total, 31);
  __syncthreads();
  return before + __shfl_sync(ALL_LANES, warps_before, warp_id());
}

/* Returns whether this block is the last of the `blocks` blocks that call this. The last block then sees all that
 * the others wrote to global memory before their calls. *counter: 0 before the first call and after the last. flag:
 * one word in shared memory. */
KV_DEVICE bool block_is_last(uint32_t *counter, uint32_t blocks, uint32_t *flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    *flag = atomic_add_acq_rel(counter, 1) + 1 == blocks;
    if (*flag) *counter = 0;
  }
  __syncthreads();
  return *flag != 0;
}
#endif
