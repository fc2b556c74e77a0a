/* attend_score, attend_error and attend_peak on every instruction set of this processor: the bits of attend and then
 * the op, alone and with threads. Outputs start as NaN. See run.sh. */
#include "problem.h"

typedef struct {
  problem p;
  kv_attend attend;
  kv_observers rows; /* R, row_first, stop, causal and weight */
  int64_t C, outs;   /* outs: numbers of attend's out */
  int32_t *lo, *hi;
  int span;
} call;

static call make_call(kv_dtype dtype, int64_t T, int64_t S, int64_t longest) {
  call x = {.p = make(dtype, T, S, longest, 1), .C = longest + S + below(9), .span = -1};
  const problem *p = &x.p;
  const int64_t heads = p->B * p->Hkv, R = below(3) ? T - below(T < 40 ? T + 1 : 40) : below(T + 1);
  x.attend = (kv_attend){dtype, p->B, p->H,     p->Hkv,   T,    S,        p->D, p->scale, p->softcap,
                         p->q,  {0},  p->slots, p->chunk, NULL, p->sinks, NULL, NULL,     p->rows};
  memcpy(x.attend.q_stride, p->q_stride, sizeof p->q_stride);
  x.outs = p->B * T * p->H * p->D;
  int32_t *row_first = need((size_t)p->B, sizeof *row_first);
  for (int64_t b = 0; b < p->B; b++) row_first[b] = (int32_t)(below(2) ? 0 : below(R + 1));
  x.rows = (kv_observers){.R = R, .row_first = row_first, .stop = p->stop, .causal = below(4) > 0};
  if (below(2)) {
    float *weight = need((size_t)(p->B * p->H * R), sizeof *weight);
    for (int64_t i = 0; i < p->B * p->H * R; i++) weight[i] = below(99) ? (float)normal() : NAN;
    x.rows.weight = weight, x.rows.weight_stride[0] = p->H * R, x.rows.weight_stride[1] = R;
  }
  if (below(3) == 0) x.span = (int)below(longest + 9);
  x.lo = need((size_t)heads, sizeof *x.lo), x.hi = need((size_t)heads, sizeof *x.hi);
  for (int64_t i = 0; i < heads; i++) {
    const int64_t n = p->slots.len[i] + p->stop[i / p->Hkv] - p->chunk.first[i / p->Hkv];
    x.hi[i] = (int32_t)below(n + 1), x.lo[i] = (int32_t)below(x.hi[i] + 1);
  }
  return x;
}

static void drop_call(call *x) {
  free((void *)x->rows.row_first), free((void *)x->rows.weight), free(x->lo), free(x->hi);
  drop(&x->p);
}

static kv_score score_of(const call *x) {
  kv_score a = {.rows = x->rows, .C = x->C, .term = (kv_term)below(3), .reduce = (kv_reduce)below(3)};
  if (a.reduce == KV_MAX) a.rows.weight = NULL, a.term = a.term == KV_ENTROPY ? KV_A : a.term;
  a.group = (kv_reduce)below(4);
  return a;
}

/* The lse that the observers have over the span, by attend. */
static float *span_lse(const call *x) {
  const int64_t heads = x->p.B * x->p.Hkv, R = x->rows.R, rows = x->p.B * x->p.H * R;
  int32_t *len = need((size_t)heads, sizeof *len);
  float *lse = nans(rows);
  void *out = need((size_t)(rows * x->p.D), sizeof(float));
  kv_attend a = x->attend;
  for (int64_t i = 0; i < heads; i++) len[i] = x->p.slots.len[i] < x->span ? x->p.slots.len[i] : x->span;
  a.slots.len = len, a.T = R, a.out = out, a.lse = lse;
  a.q = (const char *)a.q + (x->p.T - R) * a.q_stride[2] * kv_size(a.dtype);
  check(kv_attend_cpu(&a) == KV_OK, "status of the span's attend");
  free(len), free(out);
  return lse;
}

/* of: 0 score, 1 error, 2 peak. results: numbers that the op writes. */
static void test_fused(int of, kv_dtype dtype, int64_t T, int64_t S, int64_t longest) {
  call x = make_call(dtype, T, S, longest);
  const problem *p = &x.p;
  kv_attend_score score = {x.attend, score_of(&x), of == 0 ? x.span : -1};
  kv_attend_error error = {x.attend, {.rows = x.rows, .C = x.C, .kind = (kv_error_kind)below(3)}};
  kv_attend_peak peak = {x.attend, {.rows = x.rows, .lo = x.lo, .hi = x.hi}};
  error.error.alpha = (float)below(2), error.error.group = score.score.group;
  const int64_t lses = p->B * p->H * T, each = score.score.group == KV_NONE ? p->H : p->Hkv;
  const int64_t results = p->B * (of == 2 ? p->H * x.rows.R : each * x.C);
  void *out[3];
  float *lse[3], *result[3], *own = NULL;
  for (int i = 0; i < 3; i++) { /* apart, in one call, the same with threads */
    out[i] = need((size_t)x.outs, sizeof(float)), lse[i] = nans(lses), result[i] = nans(results);
    kv_attend *attend = of == 0 ? &score.attend : of == 1 ? &error.attend : &peak.attend;
    attend->out = out[i], attend->lse = lse[i];
    score.score.out = error.error.out = peak.peak.out = result[i];
    kv_set_parallel(i == 2 ? threads_hook : NULL, 3);
    kv_status status;
    if (i) {
      status = of == 0   ? kv_attend_score_cpu(&score)
               : of == 1 ? kv_attend_error_cpu(&error)
                         : kv_attend_peak_cpu(&peak);
    } else {
      kv_score s = score.score;
      kv_error e = error.error;
      kv_peak k = peak.peak;
      check(kv_attend_cpu(attend) == KV_OK, "attend status");
      kv_last_rows(attend, of == 0 ? &s.rows : of == 1 ? &e.rows : &k.rows);
      if (of == 1) kv_last_outputs(attend, &e);
      if (of == 0 && x.span >= 0) {
        own = span_lse(&x);
        s.rows.lse = own, s.rows.lse_stride[0] = p->H * x.rows.R, s.rows.lse_stride[1] = x.rows.R;
      }
      status = of == 0 ? kv_score_cpu(&s) : of == 1 ? kv_error_cpu(&e) : kv_peak_cpu(&k);
    }
    check(status == KV_OK, "status");
    check(i == 0 || p->wild || memcmp(out[0], out[i], (size_t)(x.outs * kv_size(dtype))) == 0, "out");
    check_same(lse[0], lse[i], lses, "lse");
    check_same(result[0], result[i], results, of == 0 ? "score" : of == 1 ? "error" : "peak");
  }
  for (int i = 0; i < 3; i++) free(out[i]), free(lse[i]), free(result[i]);
  free(own);
  drop_call(&x);
}

static int test_isa(void) {
  static const int64_t lengths[] = {0, 1, 5, 65, 66, 97, 130, 200}, slots[] = {0, 1, 40, 255, 300, 600};
  static const char *const names[] = {"score", "error", "peak"};
  const int n = rounds(60);
  for (int of = 0; of < 3; of++) {
    const int before = failures;
    for (int i = 0; i < n; i++) {
      const int64_t T = one_of(8, lengths);
      test_fused(of, (kv_dtype)(i % 3), T, below(3) ? T : one_of(8, lengths), one_of(6, slots));
    }
    report(names[of], before);
  }
  return failures > 0;
}

int main(void) { return run_isas(test_isa); }
