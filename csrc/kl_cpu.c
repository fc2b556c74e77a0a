/* KL divergence from a target to the mean attention of observing rows, on a CPU. Three passes compute the rows'
 * log-sum-exp; the rows' mean attention, as in score; and the divergence of each query head. observe.h has the
 * loops. */
#include "kl.h"

/* Adds to total [G, most] the attention weights a = 2^(s - lse) of the tile's n steps. */
static void kv_kl_tile(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t, int64_t n, int64_t most) {
  (void)job, (void)t;
  for (int64_t g = 0; g < head->query.G; g++)
    for (int64_t c = 0; c < most; c += VL) {
      vf acc = vf_set1(0);
      for (int64_t r = g * n; r < (g + 1) * n; r++) acc += vf_exp2(vf_load(x->s + r * KEYS + c) - x->lse[r]);
      vf_store(x->total + g * KEYS + c, vf_load(x->total + g * KEYS + c) + acc);
    }
}

static void kv_kl_body(void *ctx, int64_t begin, int64_t end) {
  const kv_kl *a = ctx;
  const int64_t G = a->rows.H / a->rows.Hkv;
  for (int64_t i = begin; i < end; i++) {
    const kv_kl_of x = kv_kl_head(a->target, a->N, a->mean_attn, a->C, i, kv_observed_of(&a->rows, i / G).n);
    double loss = 0;
    for (int64_t c = 0; c < x.n && !x.empty; c++) {
      const double t = x.target[c] / x.target_sum, p = fmax(x.attention[c], KV_KL_LEAST) / x.attention_sum;
      if (t != 0) loss += t * log(t / p);
    }
    a->loss[i] = (float)loss;
  }
}

kv_status KV_OP(kl)(const kv_kl *a) {
  const int64_t rows = a->rows.B * a->rows.H * a->rows.R;
  kv_observers with = a->rows;
  kv_observe job;
  const int ready = kv_observe_start(&job, &a->rows, a);
  if (ready && rows) memcpy(a->lse, job.lse, (size_t)rows * sizeof *a->lse);
  kv_status status = kv_observe_end(&job);
  with.lse = a->lse, with.lse_stride[0] = a->rows.H * a->rows.R, with.lse_stride[1] = a->rows.R;
  const kv_reduction how = {.C = a->C, .group = KV_NONE, .mean = 1, .out = a->mean_attn, .tile = kv_kl_tile};
  if (status == KV_OK) status = kv_reduce_rows(&with, a, &how);
  kv_kl of = *a;
  if (status == KV_OK) kv_parallel_for(a->rows.B * a->rows.H, 1, kv_kl_body, &of);
  return status;
}
