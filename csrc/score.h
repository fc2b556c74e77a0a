/* How score reduces the attention weights a[r,i] = exp(logit[r,i] - lse[r]) of observing rows r for every alive slot i,
 * on a CPU. observe.h has the loops. */
#ifndef KVEVICT_SCORE_H
#define KVEVICT_SCORE_H
#include "observe.h"

/* Returns -a ln a for a = 2^x; 0 for x = -inf. */
KV_INLINE vf kv_entropy(vf x) {
  x = vf_max(vf_set1(-127), x);
  return vf_exp2(x) * x * -KV_LN2;
}

/* Adds one row's contributions in its first `most` columns to acc, a multiple of VL of them: w times a, a^2 or -a ln a,
 * as `term` says, with a = 2^(s - lse); of KV_MAX the larger ones. */
KV_INLINE void kv_score_row(float *acc, const float *s, float lse, float w, int64_t most, kv_reduce reduce,
                            kv_term term) {
  const float power = term == KV_SQUARE ? 2 : 1;
  if (reduce == KV_MAX)
    for (int64_t c = 0; c < most; c += VL)
      vf_store(acc + c, vf_max_nan(vf_load(acc + c), vf_exp2(power * (vf_load(s + c) - lse))));
  else if (term == KV_ENTROPY)
    for (int64_t c = 0; c < most; c += VL) vf_store(acc + c, vf_load(acc + c) + w * kv_entropy(vf_load(s + c) - lse));
  else
    for (int64_t c = 0; c < most; c += VL)
      vf_store(acc + c, vf_load(acc + c) + w * vf_exp2(power * (vf_load(s + c) - lse)));
}

/* Reduces the tile's n steps into total [G, most]. Logits that fused.h keeps come from a distant cache: a row's lie one
 * after the other, so rows are the outer loop. */
static void kv_score_reduce(const kv_tile *x, int64_t G, int64_t n, int64_t most, kv_reduce reduce, kv_term term) {
  for (int64_t g = 0; g < G; g++) {
    float acc[KEYS] = {0}, *total = x->total + g * KEYS;
    for (int64_t i = 0; i < n; i++)
      kv_score_row(acc, x->s + g * x->by_head + i * x->by_step, x->lse[g * n + i], x->w[g * n + i], most, reduce, term);
    for (int64_t c = 0; c < most; c += VL) {
      const vf old = vf_load(total + c), add = vf_load(acc + c);
      vf_store(total + c, reduce == KV_MAX ? vf_max_nan(old, add) : old + add);
    }
  }
}

static void kv_score_tile(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t, int64_t n,
                          int64_t most) {
  const kv_score *a = job->op;
  (void)t;
  kv_score_reduce(x, head->query.G, n, most, a->reduce, a->term);
}

/* Returns how the op reduces the rows; job->op must be `a`. */
static kv_reduction kv_score_how(const kv_score *a) {
  return (kv_reduction){.C = a->C,
                        .group = a->group,
                        .mean = a->reduce == KV_MEAN,
                        .largest = a->reduce == KV_MAX,
                        .out = a->out,
                        .tile = kv_score_tile};
}
#endif
