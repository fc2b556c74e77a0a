/* Computes the gradient of kl with respect to queries and new keys, on a GPU; kl_grad_cpu.c has the formulas. A
 * block computes the gradient of one query or of one new key. It keeps this vector in shared memory, and each thread
 * computes its dot product with another key or query. The observing rows are too few to fill tensor cores.
 *
 * budget: regs 128, smem 12288 (registers of a thread, bytes of a block) */
#include "kl.cuh"
#include "launch.cuh"

/* A block's shared memory. red: for reductions; x: the block's own query or key; weight: factors of the vectors that
 * weighted_sum adds; part: its partial sums. */
struct KlShared {
  float *red, *x, *weight, *part; /* red [32], x [256], weight [KL_THREADS], part [groups, D] */
};

KV_DEVICE KlShared kl_shared() {
  float *at = shared_memory<float>();
  return {at, at + 32, at + 32 + 256, at + 32 + 256 + KL_THREADS};
}

template <class E>
constexpr size_t KL_BYTES = (32 + 256 + KL_THREADS + KL_THREADS * VECTOR<E>)*sizeof(float);

template <class E>
KV_DEVICE void vector_at(uint64_t at, int d, float (&x)[VECTOR<E>]) {
  vector_floats<E>(load_once_16(reinterpret_cast<const E *>(at) + d), x);
}

/* x [D] = the vector at address `at`, as floats in shared memory. All threads may read it when this returns. */
template <class E>
KV_DEVICE void share_vector(uint64_t at, int D, float *x) {
  const int d = threadIdx.x * VECTOR<E>;
  if (d < D) {
    float v[VECTOR<E>];
    vector_at<E>(at, d, v);
#pragma unroll
    for (int i = 0; i < VECTOR<E>; i++) x[d + i] = v[i];
  }
  __syncthreads();
}

template <class E>
KV_DEVICE float dot(uint64_t at, int D, const float *x) {
  float sum = 0;
  for (int d = 0; d < D; d += VECTOR<E>) {
    float v[VECTOR<E>];
    vector_at<E>(at, d, v);
#pragma unroll
    for (int i = 0; i < VECTOR<E>; i++) sum += v[i] * x[d + i];
  }
  return sum;
}

/* out [D] = scale * sum over i < count of weight(i) * (the vector at address at(i)). Vectors with weight 0 are not
 * read. */
template <class E, class At, class Weight>
KV_DEVICE void weighted_sum(const KlShared &shared, int count, int D, float scale, float *out, At at, Weight weight) {
  const int vectors = D / VECTOR<E>, groups = KL_THREADS / vectors, group = threadIdx.x / vectors;
  const int d = threadIdx.x % vectors * VECTOR<E>;
  float total[VECTOR<E>] = {};
  for (int i0 = 0; i0 < count; i0 += KL_THREADS) {
    const int i = i0 + threadIdx.x;
    shared.weight[threadIdx.x] = i < count ? weight(i) : 0;
    __syncthreads();
    for (int j = group; group < groups && j < min(KL_THREADS, count - i0); j += groups) {
      const float w = shared.weight[j];
      if (w == 0) continue;
      float v[VECTOR<E>];
      vector_at<E>(at(i0 + j), d, v);
#pragma unroll
      for (int k = 0; k < VECTOR<E>; k++) total[k] += w * v[k];
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < VECTOR<E>; k++)
    if (group < groups) shared.part[group * D + d + k] = total[k];
  __syncthreads();
  if ((int)threadIdx.x >= D) return;
  float sum = 0;
  for (int g = 0; g < groups; g++) sum += shared.part[g * D + threadIdx.x];
  out[threadIdx.x] = scale * sum;
}

/* Returns the gradient of the loss, times `grad`, with respect to one row's attention weight of slot c. */
KV_DEVICE float weight_grad(const KlHead &x, float grad, int c) {
  if (c >= x.n || x.empty) return 0;
  const float p = x.attention[c];
  return grad * (1 / x.attention_sum - (p < KV_KL_LEAST ? 0 : x.target[c] / x.target_sum / p));
}

struct Weight {
  float a, softcap_grad;
};

/* Returns, for s = q.k and a row's log-sum-exp in log2 units, the attention weight and the derivative of the softcap
 * at s. */
KV_DEVICE Weight weight_of(const Logits &logits, float s, float lse) {
  const float y = logits.transformed ? logits.of(s) : s;
  return {exp2_approx(logits.scale * y - lse), logits.cap_grad(y)};
}

KV_DEVICE float row_grad(const kv_kl_grad &a, int64_t head) {
  return a.grad[head] / (float)max((int)a.rows.R - a.rows.row_first[head / a.rows.H], 1);
}

template <class E>
KV_DEVICE uint64_t query_at(const kv_observers &a, int64_t head, int r) {
  const int64_t at = head / a.H * a.q_stride[0] + head % a.H * a.q_stride[1] + r * a.q_stride[2];
  return reinterpret_cast<uint64_t>(static_cast<const E *>(a.q) + at);
}

/* Block (r, query head) computes dq of row r. It also writes what dk_kernel needs: delta [B, H, R], each row's sum
 * over slots of attention weight * weight_grad, and sums [B, H, 2], the head's target_sum and attention_sum. */
template <class E>
static __global__ void __launch_bounds__(KL_THREADS, 2)
    dq_kernel(const kv_kl_grad a, const Logits logits, float *delta, float *sums) {
  const kv_observers &rows = a.rows;
  const int64_t head = block_head();
  if (head >= rows.B * rows.H) return;
  const int r = blockIdx.x, G = rows.H / rows.Hkv, D = rows.D;
  const Observed x = observed<E>(rows, head / rows.H * rows.Hkv + head % rows.H / G);
  const KlShared shared = kl_shared();
  const KlHead of = kl_head(rows, a.target, a.N, a.mean_attn, a.C, head, shared.red);
  const float natural = rows.lse[x.b * rows.lse_stride[0] + head % rows.H * rows.lse_stride[1] + r];
  const float lse = natural * LOG2E, grad = row_grad(a, head);
  const int seen = natural == -INFINITY || r < x.row_first ? 0 : x.bounds.seen(r);
  share_vector<E>(query_at<E>(rows, head, r), D, shared.x);
  float c = 0;
  for (int i = threadIdx.x; i < seen; i += KL_THREADS)
    c += weight_of(logits, dot<E>(kv_segments_at(&x.k.at, i), D, shared.x), lse).a * weight_grad(of, grad, i);
  c = block_sum(c, shared.red);
  if (threadIdx.x == 0) {
    delta[head * rows.R + r] = c;
    if (r == 0) sums[2 * head] = of.target_sum, sums[2 * head + 1] = of.attention_sum;
  }
  weighted_sum<E>(
      shared, seen, D, rows.scale, a.dq + (head * rows.R + r) * D, [&](int i) { return kv_segments_at(&x.k.at, i); },
      [&](int i) {
        const Weight w = weight_of(logits, dot<E>(kv_segments_at(&x.k.at, i), D, shared.x), lse);
        return w.a == 0 ? 0 : w.a * w.softcap_grad * (weight_grad(of, grad, i) - c);
      });
}

/* Block (j, kv head) computes dk of new key j, summed over the query heads of the group. */
template <class E>
static __global__ void __launch_bounds__(KL_THREADS, 2)
    dk_kernel(const kv_kl_grad a, const Logits logits, const float *delta, const float *sums) {
  const kv_observers &rows = a.rows;
  const int64_t at = block_head();
  if (at >= rows.B * rows.Hkv) return;
  const int j = blockIdx.x, G = rows.H / rows.Hkv, D = rows.D, R = rows.R;
  const Observed x = observed<E>(rows, at);
  const KlShared shared = kl_shared();
  float *out = a.dk + (at * rows.S + j) * D;
  const int first = rows.chunk.first[x.b], column = x.k.at.len + j - first;
  if (j < first || j >= rows.stop[x.b]) {
    if ((int)threadIdx.x < D) out[threadIdx.x] = 0;
    return;
  }
  share_vector<E>(kv_segments_at(&x.k.at, column), D, shared.x);
  const int64_t head0 = x.b * rows.H + x.h * G;
  weighted_sum<E>(
      shared, G * R, D, rows.scale, out, [&](int i) { return query_at<E>(rows, head0 + i / R, i % R); },
      [&](int i) {
        const int64_t head = head0 + i / R;
        const int r = i % R;
        const float lse = rows.lse[x.b * rows.lse_stride[0] + head % rows.H * rows.lse_stride[1] + r];
        if (lse == -INFINITY || r < x.row_first || column >= x.bounds.seen(r)) return 0.0f;
        const KlHead of = {min(x.k.at.n, (int)a.N),  a.target + head * a.N,
                           a.mean_attn + head * a.C, sums[2 * head],
                           sums[2 * head + 1],       sums[2 * head] == 0 || sums[2 * head + 1] == 0};
        const Weight w = weight_of(logits, dot<E>(query_at<E>(rows, head, r), D, shared.x), lse * LOG2E);
        const float grad = weight_grad(of, row_grad(a, head), column) - delta[head * R + r];
        return w.a == 0 ? 0.0f : w.a * w.softcap_grad * grad;
      });
}

template <class E>
static int run(const kv_kl_grad *a, float *delta, void *stream) {
  const kv_observers &x = a->rows;
  const Logits logits = logits_of(x.scale, x.softcap);
  float *sums = delta + x.B * x.H * x.R;
  const dim3 each = grid_of(x.R, x.B * x.H), keys = grid_of(x.S, x.B * x.Hkv);
  int error = 0;
  if (x.R) error = launch<dq_kernel<E>>(each, KL_THREADS, KL_BYTES<E>, stream, *a, logits, delta, sums);
  if (error || x.S == 0) return error;
  return launch<dk_kernel<E>>(keys, KL_THREADS, KL_BYTES<E>, stream, *a, logits, (const float *)delta,
                              (const float *)sums);
}

int64_t kv_kl_grad_cuda_scratch(const kv_kl_grad *a) {
  return a->rows.B * a->rows.H * (a->rows.R + 2) * (int64_t)sizeof(float);
}

int kv_kl_grad_cuda(const kv_kl_grad *a, void *scratch, void *stream) {
  if (a->rows.B * a->rows.H == 0) return 0;
  return dispatch(a->rows.dtype, [&](auto e) { return run<decltype(e)>(a, static_cast<float *>(scratch), stream); });
}
