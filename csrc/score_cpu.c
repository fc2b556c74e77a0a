/* Importance of every alive slot from observing rows on a CPU: a[r,i] = exp(logit[r,i] - lse[r]) reduced over rows.
 *
 * A task is one block of keys of one (b, kv head) and owns these columns; it goes over all rows. See observe.h.
 */
#include "observe.h"

kv_status KV_OP(score)(const kv_score *a);

/* -a ln a of a = 2^x; 0 for x = -inf. */
KV_INLINE vf kv_entropy(vf x) {
  x = vf_max(vf_set1(-127), x);
  return vf_exp2(x) * x * -KV_LN2;
}

/* total [G, most] gains sum or maximum over the tile's n steps of w times the term of a = 2^(s - lse). */
static void kv_score_reduce(const kv_tile *x, int64_t G, int64_t n, int64_t most, kv_reduce reduce,
                            kv_term term) {
  const float power = term == KV_SQUARE ? 2 : 1;
  for (int64_t g = 0; g < G; g++)
    for (int64_t c = 0; c < most; c += VL) {
      const float *s = x->s + g * n * KEYS + c, *lse = x->lse + g * n, *w = x->w + g * n;
      float *total = x->total + g * KEYS + c;
      vf acc = vf_set1(0);
      if (reduce == KV_MAX) {
        for (int64_t i = 0; i < n; i++) acc = vf_max_nan(acc, vf_exp2(power * (vf_load(s + i * KEYS) - lse[i])));
        vf_store(total, vf_max_nan(vf_load(total), acc));
      } else {
        if (term == KV_ENTROPY)
          for (int64_t i = 0; i < n; i++) acc += w[i] * kv_entropy(vf_load(s + i * KEYS) - lse[i]);
        else
          for (int64_t i = 0; i < n; i++) acc += w[i] * vf_exp2(power * (vf_load(s + i * KEYS) - lse[i]));
        vf_store(total, vf_load(total) + acc);
      }
    }
}

static void kv_score_block(const kv_observe *job, kv_tile *x, int64_t at, int64_t c0) {
  const kv_score *a = job->op;
  const kv_observed head = kv_observed_of(job->a, at);
  const int64_t G = head.query.G, R = job->a->R, from = job->a->row_first[head.b];
  const int64_t columns = kv_min(kv_block(job->a->D), head.k.n - c0);
  float *out = kv_group_at(a->out, job->a, &head, a->group, a->C);
  if (c0 == 0) kv_group_zeros(out, G, a->group, head.k.n, a->C);
  if (columns <= 0) return;
  kv_pack_k(&head.k, c0, columns, x->k, x->row);
  memset(x->total, 0, (size_t)(G * KEYS) * sizeof *x->total);
  for (int64_t t = from; t < R; t += x->steps) {
    const int64_t n = kv_min(x->steps, R - t), most = kv_tile_observe(job, &head, x, t, n, c0, columns);
    kv_score_reduce(x, G, n, most, a->reduce, a->term);
  }
  kv_group_out(x->total, G, a->group, a->reduce == KV_MEAN ? kv_max(R - from, 1) : 1, out, a->C, c0, columns);
}

static void kv_score_body(void *ctx, int64_t begin, int64_t end) {
  kv_observe *job = ctx;
  const int64_t heads = job->a->B * job->a->Hkv;
  kv_tile x;
  void *memory = kv_tile_alloc(&x, job->a->H / job->a->Hkv, job->a->D, 0);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) kv_score_block(job, &x, i % heads, i / heads * kv_block(job->a->D));
  free(memory);
}

kv_status KV_OP(score)(const kv_score *a) {
  const int64_t block = kv_block(a->rows.D), blocks = kv_max((a->C + block - 1) / block, 1);
  kv_observe job;
  if (kv_observe_start(&job, &a->rows, a)) kv_parallel_for(a->rows.B * a->rows.Hkv * blocks, 1, kv_score_body, &job);
  return kv_observe_end(&job);
}
