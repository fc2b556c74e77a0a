/* Computes quadratic forms x_i . (A x_i + b) of the alive keys or values x_i, for every query head, on a GPU.
 *
 * A block holds KEYS slots of a head as fp32 in shared memory and goes over the rows of A, ROWS at a time. A thread
 * multiplies one slot with EACH (4) of these rows; at the end the sums of a slot's GROUPS threads are added in
 * order.
 *
 * budget: regs 80, smem 82944 (registers of a thread, bytes of a block) */
#include "columns.cuh"
#include "grid.cuh"

constexpr int THREADS = 256, KEYS = 64, GROUPS = THREADS / KEYS, EACH = 4, ROWS = GROUPS * EACH;
/* unused floats after each slot, so that 8 lanes that read 16 bytes each, of 8 slots, use different banks */
constexpr int PAD = 4;

KV_DEVICE float dot_of(float4 x, float4 y, float sum) {
  return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

/* Block (i, query head) computes slots i * KEYS .. i * KEYS + KEYS - 1. */
template <class E>
static __global__ void __launch_bounds__(THREADS) quadratic_kernel(const kv_quadratic a) {
  const int64_t head = block_head();
  if (head >= a.B * a.H) return;
  const int64_t b = head / a.H;
  const int h = (int)(head % a.H), D = a.D, width = D + PAD, c0 = blockIdx.x * KEYS, thread = threadIdx.x;
  const Columns slots = head_columns<E>(KV_KEYS, a.slots, a.chunk, b, h / (a.H / a.Hkv), a.Hkv, a.stop[b], a.D);
  /* slots [KEYS, width]; rows of A [ROWS, D] */
  float *const x = shared_memory<float>(), *const rows = x + KEYS * width;
  for (int c = warp_id(); c < KEYS; c += THREADS / 32) { /* each warp loads one slot at a time */
    constexpr int W = VECTOR<E>, V = 8 / W;
    float part[V][W];
    column_numbers<E, 32, V>(slots, c0 + c, c0 + c < slots.at.n, D, part);
    unrolled<V, W>([&](int v, int j) {
      if (const int d = (v * 32 + lane_id()) * W + j; d < D) x[c * width + d] = part[v][j];
    });
  }
  const float *matrix = a.matrix + b * a.matrix_stride[0] + h * a.matrix_stride[1];
  const float *linear = a.linear ? a.linear + b * a.linear_stride[0] + h * a.linear_stride[1] : nullptr;
  const int group = thread / KEYS;
  const float *const own = x + thread % KEYS * width;
  float total = 0;
  for (int r0 = 0; r0 < D; r0 += ROWS) {
    __syncthreads(); /* all threads have read the previous rows of A */
    for (int i = thread; i < ROWS * D; i += THREADS)
      rows[i] = r0 + i / D < D ? matrix[(r0 + i / D) * a.matrix_stride[2] + i % D] : 0;
    __syncthreads();
    float y[EACH] = {};
    for (int d = 0; d < D; d += 4) {
      const float4 part = *reinterpret_cast<const float4 *>(own + d);
#pragma unroll
      for (int j = 0; j < EACH; j++)
        y[j] = dot_of(part, *reinterpret_cast<const float4 *>(rows + (group * EACH + j) * D + d), y[j]);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int r = r0 + group * EACH + j;
      if (r < D) total = fmaf(own[r], y[j] + (linear ? linear[r] : 0), total);
    }
  }
  __syncthreads();
  rows[thread] = total;
  __syncthreads();
  if (group > 0 || c0 + thread >= a.C) return;
  for (int g = 1; g < GROUPS; g++) total += rows[g * KEYS + thread];
  a.out[head * a.C + c0 + thread] = c0 + thread < slots.at.n ? total : 0;
}

int64_t kv_quadratic_cuda_scratch(const kv_quadratic *) { return 0; }

int kv_quadratic_cuda(const kv_quadratic *a, void *, void *stream) {
  const int64_t heads = a->B * a->H;
  if (heads == 0 || a->C == 0) return 0;
  const int64_t floats = KEYS * (a->D + PAD) + (ROWS * a->D < THREADS ? THREADS : ROWS * a->D);
  const dim3 grid = grid_of((a->C + KEYS - 1) / KEYS, heads);
  return dispatch(a->dtype, [&](auto e) {
    return launch<quadratic_kernel<decltype(e)>>(grid, THREADS, floats * sizeof(float), stream, *a);
  });
}
