/* CAOTE on a GPU: what removing each slot would do to the head's output, the pooled score being the attention.
 *
 * Three passes: each head's sum of scores; the mean value of each stretch of slots; these added up by every block of the
 * third, which takes the distances. No sum has more than some hundred terms one after the other up to 10^5 slots.
 *
 * budget: regs 64, smem 9216 */
#include <float.h>

#include "launch.cuh"
#include "rows.cuh"
#include "warp.cuh"

namespace {

constexpr int THREADS = 256, STRETCH = THREADS, LANES = 8, RUN = 32;

template <class E>
__device__ __forceinline__ Columns<E> values_of(const kv_refine &a, int64_t head) {
  const int64_t b = head / a.Hkv;
  return columns_of<E>(a.slots, a.slots.v, a.fresh.v, a.fresh.v_stride, b, head % a.Hkv, head, a.fresh.first[b],
                       a.stop[b], a.D);
}

__global__ void __launch_bounds__(THREADS) refine_sum(const kv_refine a, float *sum) {
  const int64_t head = blockIdx.x, b = head / a.Hkv;
  const int n = a.slots.len[head] + a.stop[b] - a.fresh.first[b];
  float x = 0;
  for (int c = threadIdx.x; c < n; c += THREADS) x += a.score[head * a.C + c];
  x = block_sum(x, shared_memory<float>());
  if (threadIdx.x == 0) sum[head] = x;
}

/* hn of slot c */
__device__ __forceinline__ float share_of(const kv_refine &a, int64_t head, int n, int c, float sum) {
  return sum == 0 ? 1 / (float)n : a.score[head * a.C + c] / sum;
}

/* Block (head, i): mean [B, Hkv, stretches, D] of stretch i. Each thread has 16 bytes of every so many rows. */
template <class E>
__global__ void __launch_bounds__(THREADS) refine_mean(const kv_refine a, const float *sum, float *mean) {
  const int64_t head = blockIdx.x;
  const Columns<E> v = values_of<E>(a, head);
  const int vectors = v.D / VECTOR<E>, groups = THREADS / vectors, group = threadIdx.x / vectors;
  const int d = threadIdx.x % vectors * VECTOR<E>, c0 = blockIdx.y * STRETCH, count = min(v.n - c0, STRETCH);
  float *share = shared_memory<float>(), *part = share + STRETCH; /* [STRETCH], [groups, D] */
  if ((int)threadIdx.x < count)
    share[threadIdx.x] = a.fast ? 1 / (float)v.n : share_of(a, head, v.n, c0 + threadIdx.x, sum[head]);
  __syncthreads();
  float total[VECTOR<E>] = {};
  for (int c = group; group < groups && c < count; c += groups) {
    float x[VECTOR<E>];
    floats_of<E>(load_once_16(v[c0 + c] + d), x);
#pragma unroll
    for (int i = 0; i < VECTOR<E>; i++) total[i] += share[c] * x[i];
  }
#pragma unroll
  for (int i = 0; i < VECTOR<E>; i++)
    if (group < groups) part[group * v.D + d + i] = total[i];
  __syncthreads();
  if ((int)threadIdx.x >= v.D) return;
  float x = 0;
  for (int g = 0; g < groups; g++) x += part[g * v.D + threadIdx.x];
  mean[(head * gridDim.y + blockIdx.y) * v.D + threadIdx.x] = x;
}

/* shared [D] = the sum of `stretches` rows of mean, RUN of them at a time */
__device__ void add_means(const float *mean, int stretches, int D, float *shared) {
  if ((int)threadIdx.x < D) {
    float x = 0;
    for (int i = 0; i < stretches; i += RUN) {
      float run = 0;
      for (int j = i; j < min(stretches, i + RUN); j++) run += mean[j * D + threadIdx.x];
      x += run;
    }
    shared[threadIdx.x] = x;
  }
  __syncthreads();
}

/* Block (head, i): out of stretch i. LANES lanes share a row. */
template <class E>
__global__ void __launch_bounds__(THREADS) refine_error(const kv_refine a, const float *sum, const float *mean) {
  const int64_t head = blockIdx.x;
  const Columns<E> v = values_of<E>(a, head);
  float *m = shared_memory<float>();
  add_means(mean + head * gridDim.y * v.D, (v.n + STRETCH - 1) / STRETCH, v.D, m);
  const int lane = threadIdx.x % LANES;
  for (int i = 0; i < STRETCH; i += THREADS / LANES) {
    const int c = blockIdx.y * STRETCH + i + threadIdx.x / LANES;
    float square = 0;
    for (int d = lane * VECTOR<E>; c < v.n && d < v.D; d += LANES * VECTOR<E>) {
      float x[VECTOR<E>];
      floats_of<E>(load_once_16(v[c] + d), x);
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

int64_t stretches_of(const kv_refine *a) { return (a->C + STRETCH - 1) / STRETCH; }

template <class E>
int run(const kv_refine *a, float *sum, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  const dim3 each((unsigned)heads), grid((unsigned)heads, (unsigned)stretches_of(a));
  float *mean = sum + heads;
  int error = launch<refine_sum>(each, THREADS, 32 * sizeof(float), stream, *a, sum);
  if (error == 0)
    error =
        launch<refine_mean<E>>(grid, THREADS, (STRETCH + THREADS * VECTOR<E>)*4, stream, *a, (const float *)sum, mean);
  if (error == 0)
    error = launch<refine_error<E>>(grid, THREADS, a->D * 4, stream, *a, (const float *)sum, (const float *)mean);
  return error;
}

}  // namespace

int64_t kv_refine_cuda_scratch(const kv_refine *a) {
  return a->B * a->Hkv * (1 + stretches_of(a) * a->D) * (int64_t)sizeof(float);
}

int kv_refine_cuda(const kv_refine *a, void *scratch, void *stream) {
  if (a->B * a->Hkv == 0 || a->C == 0) return 0;
  return with_type(a->dtype, [&](auto e) { return run<decltype(e)>(a, static_cast<float *>(scratch), stream); });
}
