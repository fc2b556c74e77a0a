/* CAOTE (attention-output error of an eviction, kv_refine) on a GPU: the error of a head's output when one slot is
 * removed, with the pooled score as attention weight.
 *
 * There are three kernels. sum_kernel sums each head's scores. mean_kernel computes, for every split of the slots,
 * its part of the mean value m. error_kernel computes the distances ||v_i - m||; each of its blocks first adds the
 * splits' parts of m. For up to 10^5 slots no sum has more than a few hundred terms in sequence.
 *
 * budget: regs 64, smem 9216 (registers of a thread, bytes of a block) */
#include <float.h>

#include "columns.cuh"
#include "grid.cuh"

constexpr int THREADS = 256, SPLIT = THREADS, RUN = 32;

template <class E>
KV_DEVICE Columns values_of(const kv_refine &a, int64_t head) {
  const int64_t b = head / a.Hkv;
  return head_columns<E>(KV_VALUES, a.slots, a.chunk, b, head % a.Hkv, a.Hkv, a.stop[b], a.D);
}

static __global__ void __launch_bounds__(THREADS) sum_kernel(const kv_refine a, float *sum) {
  const int64_t head = blockIdx.x, b = head / a.Hkv;
  const int n = a.slots.len[head] + a.stop[b] - a.chunk.first[b];
  float x = 0;
  for (int c = threadIdx.x; c < n; c += THREADS) x += a.score[head * a.C + c];
  x = block_sum(x, shared_memory<float>());
  if (threadIdx.x == 0) sum[head] = x;
}

/* Returns the share hn (kvevict.h) of slot c in the head's sum of scores; 1/n if the sum is 0. */
KV_DEVICE float share_of(const kv_refine &a, int64_t head, int n, int c, float sum) {
  return sum == 0 ? 1 / (float)n : a.score[head * a.C + c] / sum;
}

/* Block (i, kv head) computes the part of split i in mean [B, Hkv, splits, D]: the sum over its slots of share *
 * value. L lanes share a row and compute every GROUPS-th one. */
template <class E, int L, int V>
static __global__ void __launch_bounds__(THREADS) mean_kernel(const kv_refine a, const float *sum, float *mean) {
  const int64_t head = block_head();
  if (head >= a.B * a.Hkv) return;
  constexpr int W = VECTOR<E>, GROUPS = THREADS / L;
  const Columns values = values_of<E>(a, head);
  const int D = a.D, n = values.at.n, group = threadIdx.x / L, c0 = blockIdx.x * SPLIT, count = min(n - c0, SPLIT);
  float *share = shared_memory<float>(), *part = share + SPLIT; /* share [SPLIT], part [GROUPS, D] */
  if ((int)threadIdx.x < count)
    share[threadIdx.x] = a.fast ? 1 / (float)n : share_of(a, head, n, c0 + threadIdx.x, sum[head]);
  __syncthreads();
  float total[V][W] = {};
  for (int first = 0; first < count; first += GROUPS) {
    const int c = first + group;
    const float weight = c < count ? share[c] : 0;
    float x[V][W];
    column_numbers<E, L, V>(values, c0 + c, c < count, D, x);
    unrolled<V, W>([&](int v, int i) { total[v][i] += weight * x[v][i]; });
  }
  unrolled<V, W>([&](int v, int i) {
    if (const int d = (v * L + (int)threadIdx.x % L) * W + i; d < D) part[group * D + d] = total[v][i];
  });
  __syncthreads();
  if ((int)threadIdx.x >= D) return;
  float x = 0;
  for (int g = 0; g < GROUPS; g++) x += part[g * D + threadIdx.x];
  mean[(head * gridDim.x + blockIdx.x) * D + threadIdx.x] = x;
}

/* shared [D] = the sum of `splits` rows of mean [splits, D]; partial sums of RUN rows are added, to keep sequences
 * of additions short. */
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

/* Block (i, kv head) computes out of the slots of split i; L lanes share a row. The launch bounds ask ptxas for four
 * blocks a multiprocessor: to make room for eight it would spill registers. */
template <class E, int L, int V>
static __global__ void __launch_bounds__(THREADS, 4)
    error_kernel(const kv_refine a, const float *sum, const float *mean) {
  const int64_t head = block_head();
  if (head >= a.B * a.Hkv) return;
  constexpr int W = VECTOR<E>;
  const Columns values = values_of<E>(a, head);
  float *m = shared_memory<float>();
  const int D = a.D, n = values.at.n;
  add_means(mean + head * gridDim.x * D, (n + SPLIT - 1) / SPLIT, D, m);
  const int lane = threadIdx.x % L;
  for (int first = 0; first < SPLIT; first += THREADS / L) {
    const int c = blockIdx.x * SPLIT + first + threadIdx.x / L;
    float x[V][W], square = 0;
    column_numbers<E, L, V>(values, c, c < n, D, x);
    unrolled<V, W>([&](int v, int i) {
      const int d = (v * L + lane) * W + i;
      const float off = d < D ? x[v][i] - m[d] : 0;
      square += off * off;
    });
    square = lanes_sum<L>(square);
    if (lane != 0 || c >= a.C) continue;
    const float share = c < n ? share_of(a, head, n, c, sum[head]) : 0, left = 1 - share;
    const float error = left < 1e-6f ? FLT_MAX : share / left * (a.squared ? square : sqrtf(square));
    a.out[head * a.C + c] = c < n ? error : 0;
  }
}

static int64_t splits_of(const kv_refine *a) { return (a->C + SPLIT - 1) / SPLIT; }

template <class E, int L, int V>
static int run(const kv_refine *a, float *sum, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  const dim3 each((unsigned)heads), grid = grid_of(splits_of(a), heads);
  float *mean = sum + heads;
  int error = launch<sum_kernel>(each, THREADS, 32 * sizeof(float), stream, *a, sum);
  const size_t shared = (SPLIT + THREADS * V * VECTOR<E>)*sizeof(float);
  if (error == 0) error = launch<mean_kernel<E, L, V>>(grid, THREADS, shared, stream, *a, (const float *)sum, mean);
  if (error == 0)
    error = launch<error_kernel<E, L, V>>(grid, THREADS, a->D * 4, stream, *a, (const float *)sum, (const float *)mean);
  return error;
}

int64_t kv_refine_cuda_scratch(const kv_refine *a) {
  return a->B * a->Hkv * (1 + splits_of(a) * a->D) * (int64_t)sizeof(float);
}

int kv_refine_cuda(const kv_refine *a, void *scratch, void *stream) {
  if (a->B * a->Hkv == 0 || a->C == 0) return 0;
  return dispatch(a->dtype, [&](auto e) {
    using E = decltype(e);
    return with_lanes<E>(a->D, [&](auto l, auto v) {
      return run<E, decltype(l)::value, decltype(v)::value>(a, static_cast<float *>(scratch), stream);
    });
  });
}
