/* CAOTE on a GPU: the error of the head's output when a slot is removed, with the pooled score as attention weight.
 *
 * Three passes: each head's sum of scores; the mean value of each split of slots; the distances, for which every block
 * first adds the splits. Up to 10^5 slots no sum has more than a few hundred terms in sequence.
 *
 * budget: regs 64, smem 9216 */
#include <float.h>

#include "grid.cuh"
#include "vector.cuh"
#include "warp.cuh"

constexpr int THREADS = 256, SPLIT = THREADS, LANES = 8, RUN = 32;

template <class E>
static __device__ __forceinline__ kv_segments values_of(const kv_refine &a, int64_t head) {
  const int64_t b = head / a.Hkv;
  return kv_values_of(&a.slots, &a.chunk, b, head % a.Hkv, a.Hkv, a.stop[b], a.D, sizeof(E));
}

static __global__ void __launch_bounds__(THREADS) sum_kernel(const kv_refine a, float *sum) {
  const int64_t head = blockIdx.x, b = head / a.Hkv;
  const int n = a.slots.len[head] + a.stop[b] - a.chunk.first[b];
  float x = 0;
  for (int c = threadIdx.x; c < n; c += THREADS) x += a.score[head * a.C + c];
  x = block_sum(x, shared_memory<float>());
  if (threadIdx.x == 0) sum[head] = x;
}

/* hn of slot c */
static __device__ __forceinline__ float share_of(const kv_refine &a, int64_t head, int n, int c, float sum) {
  return sum == 0 ? 1 / (float)n : a.score[head * a.C + c] / sum;
}

/* Block (i, head): mean [B, Hkv, splits, D] of split i. Each thread takes the same 16 bytes of every `groups`-th
 * row. */
template <class E>
static __global__ void __launch_bounds__(THREADS) mean_kernel(const kv_refine a, const float *sum, float *mean) {
  const int64_t head = block_head();
  if (head >= a.B * a.Hkv) return;
  const kv_segments v = values_of<E>(a, head);
  const int D = a.D, vectors = D / VECTOR<E>, groups = THREADS / vectors, group = threadIdx.x / vectors;
  const int d = threadIdx.x % vectors * VECTOR<E>, c0 = blockIdx.x * SPLIT, count = min(v.n - c0, SPLIT);
  float *share = shared_memory<float>(), *part = share + SPLIT; /* [SPLIT], [groups, D] */
  if ((int)threadIdx.x < count)
    share[threadIdx.x] = a.fast ? 1 / (float)v.n : share_of(a, head, v.n, c0 + threadIdx.x, sum[head]);
  __syncthreads();
  float total[VECTOR<E>] = {};
  for (int c = group; group < groups && c < count; c += groups) {
    float x[VECTOR<E>];
    slot_floats<E>(v, c0 + c, d, x);
#pragma unroll
    for (int i = 0; i < VECTOR<E>; i++) total[i] += share[c] * x[i];
  }
#pragma unroll
  for (int i = 0; i < VECTOR<E>; i++)
    if (group < groups) part[group * D + d + i] = total[i];
  __syncthreads();
  if ((int)threadIdx.x >= D) return;
  float x = 0;
  for (int g = 0; g < groups; g++) x += part[g * D + threadIdx.x];
  mean[(head * gridDim.x + blockIdx.x) * D + threadIdx.x] = x;
}

/* shared [D] = the sum of `splits` rows of mean, RUN rows at a time */
static __device__ void add_means(const float *mean, int splits, int D, float *shared) {
  if ((int)threadIdx.x < D) {
    float x = 0;
    for (int i = 0; i < splits; i += RUN) {
      float run = 0;
      for (int j = i; j < min(splits, i + RUN); j++) run += mean[j * D + threadIdx.x];
      x += run;
    }
    shared[threadIdx.x] = x;
  }
  __syncthreads();
}

/* Block (head, i): out of split i. LANES lanes share a row. Told of four blocks an SM, ptxas does not spill for
 * eight. */
template <class E>
static __global__ void __launch_bounds__(THREADS, 4)
    error_kernel(const kv_refine a, const float *sum, const float *mean) {
  const int64_t head = block_head();
  if (head >= a.B * a.Hkv) return;
  const kv_segments v = values_of<E>(a, head);
  float *m = shared_memory<float>();
  const int D = a.D;
  add_means(mean + head * gridDim.x * D, (v.n + SPLIT - 1) / SPLIT, D, m);
  const int lane = threadIdx.x % LANES;
  for (int i = 0; i < SPLIT; i += THREADS / LANES) {
    const int c = blockIdx.x * SPLIT + i + threadIdx.x / LANES;
    const E *const row = reinterpret_cast<const E *>(kv_segments_at(&v, c));
    float square = 0;
    for (int d = lane * VECTOR<E>; c < v.n && d < D; d += LANES * VECTOR<E>) {
      float x[VECTOR<E>];
      vector_floats<E>(load_once_16(row + d), x);
#pragma unroll
      for (int j = 0; j < VECTOR<E>; j++) square += (x[j] - m[d + j]) * (x[j] - m[d + j]);
    }
    square = lanes_sum<LANES>(square);
    if (lane != 0 || c >= a.C) continue;
    const float share = c < v.n ? share_of(a, head, v.n, c, sum[head]) : 0, left = 1 - share;
    const float error = left < 1e-6f ? FLT_MAX : share / left * (a.squared ? square : sqrtf(square));
    a.out[head * a.C + c] = c < v.n ? error : 0;
  }
}

static int64_t splits_of(const kv_refine *a) { return (a->C + SPLIT - 1) / SPLIT; }

template <class E>
static int run(const kv_refine *a, float *sum, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  const dim3 each((unsigned)heads), grid = grid_of(splits_of(a), heads);
  float *mean = sum + heads;
  int error = launch<sum_kernel>(each, THREADS, 32 * sizeof(float), stream, *a, sum);
  if (error == 0)
    error =
        launch<mean_kernel<E>>(grid, THREADS, (SPLIT + THREADS * VECTOR<E>)*4, stream, *a, (const float *)sum, mean);
  if (error == 0)
    error = launch<error_kernel<E>>(grid, THREADS, a->D * 4, stream, *a, (const float *)sum, (const float *)mean);
  return error;
}

int64_t kv_refine_cuda_scratch(const kv_refine *a) {
  return a->B * a->Hkv * (1 + splits_of(a) * a->D) * (int64_t)sizeof(float);
}

int kv_refine_cuda(const kv_refine *a, void *scratch, void *stream) {
  if (a->B * a->Hkv == 0 || a->C == 0) return 0;
  return dispatch(a->dtype, [&](auto e) { return run<decltype(e)>(a, static_cast<float *>(scratch), stream); });
}
