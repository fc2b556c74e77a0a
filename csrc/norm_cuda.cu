/* Norms of the alive keys or values on a GPU: bound by reading them. Eight lanes share a row.
 *
 * budget: regs 40, smem 0 */
#include "launch.cuh"
#include "rows.cuh"
#include "warp.cuh"

namespace {

constexpr int THREADS = 256, LANES = 8, ROWS = THREADS / LANES;

/* Block (i, head): columns i * ROWS .. */
template <class E>
__global__ void __launch_bounds__(THREADS) norm_rows(const kv_norm a) {
  const int64_t head = blockIdx.y, b = head / a.Hkv;
  const Columns<E> rows = columns_of<E>(a.slots, a.slots.k, a.fresh.k, a.fresh.k_stride, b, head % a.Hkv, head,
                                        a.fresh.first[b], a.stop[b], a.D);
  const int c = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  float sum = 0;
  for (int d = lane * VECTOR<E>; c < rows.n && d < rows.D; d += LANES * VECTOR<E>) {
    float x[VECTOR<E>];
    floats_of<E>(load_once_16(rows[c] + d), x);
#pragma unroll
    for (int i = 0; i < VECTOR<E>; i++) sum += a.p == 2 ? x[i] * x[i] : fabsf(x[i]);
  }
  sum = lanes_sum<LANES>(sum);
  if (lane == 0 && c < a.C) a.out[head * a.C + c] = a.p == 2 ? sqrtf(sum) : sum;
}

}  // namespace

int kv_norm_cuda(const kv_norm *a, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0 || a->C == 0) return 0;
  const dim3 grid((unsigned)((a->C + ROWS - 1) / ROWS), (unsigned)heads);
  return with_type(a->dtype, [&](auto e) { return launch<norm_rows<decltype(e)>>(grid, THREADS, 0, stream, *a); });
}
