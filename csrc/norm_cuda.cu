/* Computes norms of the alive keys or values on a GPU, limited by memory bandwidth. L lanes share a row
 * (columns.cuh).
 *
 * budget: regs 40, smem 0 (registers of a thread, bytes of a block) */
#include "columns.cuh"
#include "grid.cuh"

constexpr int THREADS = 256;

/* Block (i, kv head) computes THREADS / L slots, L lanes each, from slot i * THREADS / L on. */
template <class E, int L, int V>
static __global__ void __launch_bounds__(THREADS) norm_kernel(const kv_norm a) {
  const int64_t head = block_head(), b = head / a.Hkv;
  if (head >= a.B * a.Hkv) return;
  const Columns rows = head_columns<E>(KV_KEYS, a.slots, a.chunk, b, head % a.Hkv, a.Hkv, a.stop[b], a.D);
  const int c = blockIdx.x * (THREADS / L) + threadIdx.x / L;
  float x[V][VECTOR<E>], sum = 0;
  column_numbers<E, L, V>(rows, c, c < rows.at.n, (int)a.D, x);
  unrolled<V, VECTOR<E>>([&](int v, int i) { sum += a.p == 2 ? x[v][i] * x[v][i] : fabsf(x[v][i]); });
  sum = lanes_sum<L>(sum);
  if (threadIdx.x % L == 0 && c < a.C) a.out[head * a.C + c] = a.p == 2 ? sqrtf(sum) : sum;
}

int64_t kv_norm_cuda_scratch(const kv_norm *) { return 0; }

int kv_norm_cuda(const kv_norm *a, void *, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0 || a->C == 0) return 0;
  return dispatch(a->dtype, [&](auto e) {
    using E = decltype(e);
    return with_lanes<E>(a->D, [&](auto l, auto v) {
      constexpr int L = decltype(l)::value, ROWS = THREADS / L;
      const dim3 grid = grid_of((a->C + ROWS - 1) / ROWS, heads);
      return launch<norm_kernel<E, L, decltype(v)::value>>(grid, THREADS, 0, stream, *a);
    });
  });
}
