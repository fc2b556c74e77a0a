/* Each observing row's largest attention weight within a range of slots, on a CPU. A task computes some rows of one (b,
 * kv head), over all blocks of keys in the range. observe.h has the tiles. */
#ifndef KVEVICT_PEAK_H
#define KVEVICT_PEAK_H
#include "observe.h"

/* Returns the largest attention weight 2^(s - lse) of a row's first `most` logits s, NaN if one of them is NaN. The
 * logits after these, up to a multiple of VL, must be -inf. */
static float kv_peak_row(const float *s, int64_t most, float lse) {
  float top = -INFINITY;
  vf acc = vf_set1(top);
  vu bad = {0};
  for (int64_t c = 0; c < most; c += VL) {
    const vf x = vf_load(s + c);
    acc = vf_max(acc, x), bad |= (vu)(x != x);
  }
  for (int i = 0; i < VL; i++) {
    if (bad[i]) return NAN;
    top = acc[i] > top ? acc[i] : top;
  }
  return vf_exp2(vf_set1(top - lse))[0];
}

/* Computes the results of steps t0 .. t1 - 1 of one (b, kv head). */
static void kv_peak_steps(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t0, int64_t t1) {
  const kv_peak *a = job->op;
  const int64_t G = head->query.G, R = job->a->R, at = head->b * job->a->Hkv + head->h;
  const int64_t lo = a->lo[at], hi = a->hi[at], from = kv_max(t0, job->a->row_first[head->b]);
  float *out = a->out + at * G * R;
  for (int64_t g = 0; g < G; g++)
    for (int64_t t = t0; t < t1; t++) out[g * R + t] = 0;
  for (int64_t c0 = lo, columns; c0 < hi && from < t1; c0 += columns) {
    columns = kv_min(kv_block(job->a->D), hi - c0);
    kv_pack_k(&head->k, head->query.pairs, c0, columns, x->k, x->row);
    for (int64_t t = from, n; t < t1; t += n) {
      n = kv_min(x->steps, t1 - t);
      const int64_t most = kv_tile_observe(job, head, x, t, n, c0, columns);
      for (int64_t r = 0; r < G * n && most > 0; r++) {
        const float p = kv_peak_row(x->s + r * KEYS, most, x->lse[r]);
        float *top = out + r / n * R + t + r % n;
        if (isnan(p) || p > *top) *top = p;
      }
    }
  }
}

static void kv_peak_body(void *ctx, int64_t begin, int64_t end) {
  kv_observe *job = ctx;
  const int64_t tasks = (job->a->R + job->steps - 1) / job->steps;
  kv_tile x;
  void *memory = kv_tile_alloc(&x, job->a->H / job->a->Hkv, job->a->D, 0);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) {
    const kv_observed head = kv_observed_of(job->a, i / tasks);
    const int64_t t0 = i % tasks * job->steps;
    kv_peak_steps(job, &head, &x, t0, kv_min(job->a->R, t0 + job->steps));
  }
  free(memory);
}

static kv_status kv_peak_rows(const kv_peak *a) {
  const int64_t heads = a->rows.B * a->rows.Hkv;
  if (heads == 0 || a->rows.R == 0) return KV_OK;
  kv_observers rows = a->rows;
  rows.weight = NULL;
  kv_observe job;
  if (kv_observe_start(&job, &rows, a))
    kv_parallel_for(heads * ((rows.R + job.steps - 1) / job.steps), 1, kv_peak_body, &job);
  return kv_observe_end(&job);
}
#endif
