/* The largest attention weight that each observing row pays to a range of slots, on a CPU.
 *
 * A task is one tile of rows of one (b, kv head): it goes over all blocks of keys in the range, so no two tasks share a
 * result. See observe.h.
 */
#include "observe.h"

kv_status KV_OP(peak)(const kv_peak *a);

/* The largest of `most` weights, NaN if there is one; logits from `most` up to a whole vector are -inf. */
static float kv_peak_row(const float *s, int64_t most, float lse) {
  vf acc = vf_set1(0);
  for (int64_t c = 0; c < most; c += VL) acc = vf_max_nan(acc, vf_exp2(vf_load(s + c) - lse));
  float top = 0;
  for (int i = 0; i < VL; i++) top = isnan(acc[i]) || acc[i] > top ? acc[i] : top;
  return top;
}

/* Steps t0 .. t0 + n - 1 of one head. */
static void kv_peak_steps(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t0, int64_t n) {
  const kv_peak *a = job->op;
  const int64_t G = head->query.G, at = head->b * job->a->Hkv + head->h, block = kv_block(job->a->D);
  float *out = a->out + at * G * job->a->R, *top = x->total;
  memset(top, 0, (size_t)(G * n) * sizeof *top);
  for (int64_t c0 = a->lo[at]; c0 < a->hi[at]; c0 += block) {
    const int64_t columns = kv_min(block, a->hi[at] - c0);
    kv_pack_k(&head->k, c0, columns, x->k, x->row);
    const int64_t most = kv_tile_observe(job, head, x, t0, n, c0, columns);
    for (int64_t r = 0; r < G * n && most > 0; r++) {
      const float p = kv_peak_row(x->s + r * KEYS, most, x->lse[r]);
      top[r] = isnan(p) || p > top[r] ? p : top[r];
    }
  }
  for (int64_t r = 0; r < G * n; r++) out[r / n * job->a->R + t0 + r % n] = top[r];
}

static void kv_peak_body(void *ctx, int64_t begin, int64_t end) {
  kv_observe *job = ctx;
  const int64_t G = job->a->H / job->a->Hkv, R = job->a->R, steps = kv_max(TILE / G, 1),
                tiles = (R + steps - 1) / steps;
  kv_tile x;
  void *memory = kv_tile_alloc(&x, G, job->a->D, 0);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) {
    const kv_observed head = kv_observed_of(job->a, i / tiles);
    const int64_t t0 = i % tiles * steps, t1 = kv_min(R, t0 + steps);
    const int64_t from = kv_min(kv_max(job->a->row_first[head.b], t0), t1);
    float *out = ((const kv_peak *)job->op)->out + (head.b * job->a->H + head.h * G) * R;
    for (int64_t g = 0; g < G; g++)
      for (int64_t t = t0; t < from; t++) out[g * R + t] = 0;
    if (from < t1) kv_peak_steps(job, &head, &x, from, t1 - from);
  }
  free(memory);
}

kv_status KV_OP(peak)(const kv_peak *a) {
  const int64_t heads = a->rows.B * a->rows.Hkv;
  if (heads == 0 || a->rows.R == 0) return KV_OK;
  const int64_t steps = kv_max(TILE / (a->rows.H / a->rows.Hkv), 1);
  kv_observers rows = a->rows;
  rows.weight = NULL;
  kv_observe job;
  if (kv_observe_start(&job, &rows, a))
    kv_parallel_for(heads * ((a->rows.R + steps - 1) / steps), 1, kv_peak_body, &job);
  return kv_observe_end(&job);
}
