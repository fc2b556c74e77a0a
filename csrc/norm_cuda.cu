/* Norms of the alive keys or values on a GPU. Limited by memory bandwidth; eight lanes share a row.
 *
 * budget: regs 40, smem 0 */
#include "grid.cuh"
#include "vector.cuh"
#include "warp.cuh"

constexpr int THREADS = 256, LANES = 8, ROWS = THREADS / LANES;

/* Block (i, head): slots i * ROWS .. i * ROWS + ROWS - 1. */
template <class E>
static __global__ void __launch_bounds__(THREADS) norm_kernel(const kv_norm a) {
  const int64_t head = block_head(), b = head / a.Hkv;
  if (head >= a.B * a.Hkv) return;
  const kv_segments rows = kv_keys_of(&a.slots, &a.chunk, b, head % a.Hkv, a.Hkv, a.stop[b], a.D, sizeof(E));
  const int c = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  float sum = 0;
  for (int d = lane * VECTOR<E>; c < rows.n && d < a.D; d += LANES * VECTOR<E>) {
    float x[VECTOR<E>];
    slot_floats<E>(rows, c, d, x);
#pragma unroll
    for (int i = 0; i < VECTOR<E>; i++) sum += a.p == 2 ? x[i] * x[i] : fabsf(x[i]);
  }
  sum = lanes_sum<LANES>(sum);
  if (lane == 0 && c < a.C) a.out[head * a.C + c] = a.p == 2 ? sqrtf(sum) : sum;
}

int64_t kv_norm_cuda_scratch(const kv_norm *) { return 0; }

int kv_norm_cuda(const kv_norm *a, void *, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0 || a->C == 0) return 0;
  const dim3 grid = grid_of((a->C + ROWS - 1) / ROWS, heads);
  return dispatch(a->dtype, [&](auto e) { return launch<norm_kernel<decltype(e)>>(grid, THREADS, 0, stream, *a); });
}
