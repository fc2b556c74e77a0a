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

/* Reduces the tile's n steps into total [G, most]. A row's contribution is w times a, a^2 or -a ln a, as `term` says,
 * with a = 2^(s - lse). */
static void kv_score_reduce(const kv_tile *x, int64_t G, int64_t n, int64_t most, kv_reduce reduce, kv_term term) {
  const float power = term == KV_SQUARE ? 2 : 1;
  for (int64_t g = 0; g < G; g++)
    for (int64_t c = 0; c < most; c += VL) {
      const float *s = x->s + g * x->by_head + c, *lse = x->lse + g * n, *w = x->w + g * n;
      float *total = x->total + g * KEYS + c;
      vf acc = vf_set1(0);
      if (reduce == KV_MAX) {
        for (int64_t i = 0; i < n; i++) acc = vf_max_nan(acc, vf_exp2(power * (vf_load(s + i * x->by_step) - lse[i])));
        vf_store(total, vf_max_nan(vf_load(total), acc));
      } else {
        if (term == KV_ENTROPY)
          for (int64_t i = 0; i < n; i++) acc += w[i] * kv_entropy(vf_load(s + i * x->by_step) - lse[i]);
        else
          for (int64_t i = 0; i < n; i++) acc += w[i] * vf_exp2(power * (vf_load(s + i * x->by_step) - lse[i]));
        vf_store(total, vf_load(total) + acc);
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
