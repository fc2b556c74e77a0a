/* Computes the KL divergence from a target to the mean attention of observing rows, on a GPU. lse_given computes the
 * rows' log-sum-exp, kv_score_cuda their mean attention, and loss_kernel the loss, one block a query head.
 *
 * budget: regs 40, smem 98304 (registers of a thread, bytes of a block) */
#include "kl.cuh"
#include "launch.cuh"

static __global__ void __launch_bounds__(KL_THREADS) loss_kernel(const kv_kl a, const float *lse) {
  const int64_t head = block_head();
  if (head >= a.rows.B * a.rows.H) return;
  float *red = shared_memory<float>();
  const KlHead x = kl_head(a.rows, a.target, a.N, a.mean_attn, a.C, head, red);
  float loss = 0;
  for (int c = threadIdx.x; c < x.n && !x.empty; c += KL_THREADS) {
    const float t = x.target[c] / x.target_sum, p = fmaxf(x.attention[c], KV_KL_LEAST) / x.attention_sum;
    if (t != 0) loss += t * logf(t / p);
  }
  loss = block_sum(loss, red);
  if (threadIdx.x == 0) a.loss[head] = loss;
  for (int r = threadIdx.x; r < a.rows.R; r += KL_THREADS) a.lse[head * a.rows.R + r] = lse[head * a.rows.R + r];
}

int64_t kv_kl_cuda_scratch(const kv_kl *a) { return lse_scratch(&a->rows); }

int kv_kl_cuda(const kv_kl *a, void *scratch, void *stream) {
  const int64_t heads = a->rows.B * a->rows.H;
  if (heads == 0) return 0;
  kv_score mean = {};
  mean.rows = a->rows, mean.C = a->C, mean.out = a->mean_attn;
  mean.term = KV_A, mean.reduce = KV_MEAN, mean.group = KV_NONE;
  int error = lse_given(&mean.rows, scratch, stream);
  if (error == 0) error = kv_score_cuda(&mean, nullptr, stream);
  if (error) return error;
  return launch<loss_kernel>(grid_of(1, heads), KL_THREADS, 32 * sizeof(float), stream, *a, mean.rows.lse);
}
