/* Chunk attention on a CPU (attend.h), alone and with observing rows (fused.h). One file has all four ops, since they
 * share the loops. */
#include "error.h"
#include "fused.h"
#include "peak.h"
#include "score.h"

kv_status KV_OP(attend)(const kv_attend *a) { return kv_attend_rows(a); }

/* Computes the lse of the observers over each head's first `span` stored slots and the new ones, as attend computes
 * it. */
static kv_status kv_span_lse(const kv_attend *a, int64_t R, int span, float *lse) {
  const int64_t heads = a->B * a->Hkv, size = kv_size(a->dtype);
  kv_attend of = *a;
  int32_t *len = malloc((size_t)heads * sizeof *len);
  void *out = malloc((size_t)(a->B * R * a->H * a->D * size));
  for (int64_t i = 0; len && i < heads; i++) len[i] = (int32_t)kv_min(a->slots.len[i], span);
  of.T = R, of.q = (const char *)a->q + (a->T - R) * a->q_stride[2] * size, of.slots.len = len;
  of.out = out, of.lse = lse;
  const kv_status status = len && out ? kv_attend_rows(&of) : KV_NO_MEMORY;
  free(len), free(out);
  return status;
}

kv_status KV_OP(attend_score)(const kv_attend_score *a) {
  kv_score score = a->score;
  kv_last_rows(&a->attend, &score.rows);
  const kv_reduction how = kv_score_how(&score);
  const int64_t rows = score.rows.B * score.rows.H * score.rows.R;
  kv_status status;
  if (kv_fused_run(&a->attend, &score.rows, &score, &how, a->span, &status)) return status;
  float *lse = NULL;
  status = kv_attend_rows(&a->attend);
  if (status == KV_OK && a->span >= 0 && rows) {
    lse = malloc((size_t)rows * sizeof *lse);
    status = lse ? kv_span_lse(&a->attend, score.rows.R, a->span, lse) : KV_NO_MEMORY;
    score.rows.lse = lse, score.rows.lse_stride[0] = score.rows.H * score.rows.R;
    score.rows.lse_stride[1] = score.rows.R;
  }
  if (status == KV_OK) status = kv_reduce_rows(&score.rows, &score, &how);
  free(lse);
  return status;
}

kv_status KV_OP(attend_error)(const kv_attend_error *a) {
  kv_error error = a->error;
  kv_last_rows(&a->attend, &error.rows);
  kv_last_outputs(&a->attend, &error);
  const kv_reduction how = kv_error_how(&error);
  kv_status status;
  if (kv_fused_run(&a->attend, &error.rows, &error, &how, -1, &status)) return status;
  status = kv_attend_rows(&a->attend);
  return status == KV_OK ? kv_reduce_rows(&error.rows, &error, &how) : status;
}

/* Raises each row's result to its largest weight among the block's columns that lie in the range. */
static void kv_peak_tile(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t, int64_t n,
                         int64_t most) {
  const kv_peak *a = job->op;
  const int64_t G = head->query.G, at = head->b * job->a->Hkv + head->h;
  const int64_t lo = kv_max(a->lo[at] - x->c0, 0), hi = kv_min(a->hi[at] - x->c0, most);
  for (int64_t r = 0; r < G * n && lo < hi; r++) {
    float s[KEYS];
    memcpy(s, x->s + r / n * x->by_head + r % n * x->by_step + lo, (size_t)(hi - lo) * sizeof *s);
    for (int64_t c = hi - lo; c < kv_round_up(hi - lo, VL); c++) s[c] = -INFINITY;
    const float p = kv_peak_row(s, hi - lo, x->lse[r]);
    float *top = a->out + (at * G + r / n) * job->a->R + t + r % n;
    if (isnan(p) || p > *top) *top = p;
  }
}

kv_status KV_OP(attend_peak)(const kv_attend_peak *a) {
  const kv_reduction how = {.tile = kv_peak_tile};
  kv_peak peak = a->peak;
  kv_last_rows(&a->attend, &peak.rows);
  peak.rows.weight = NULL;
  const int64_t rows = peak.rows.B * peak.rows.H * peak.rows.R;
  if (rows) memset(peak.out, 0, (size_t)rows * sizeof *peak.out);
  kv_status status;
  if (kv_fused_run(&a->attend, &peak.rows, &peak, &how, -1, &status)) return status;
  status = kv_attend_rows(&a->attend);
  return status == KV_OK ? kv_peak_rows(&peak) : status;
}
