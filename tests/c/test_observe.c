/* score, peak, error, refine, norm and quadratic on every instruction set of this processor against loops in double,
 * written from the comments of kvevict.h. Outputs start as NaN; each result is computed again with threads and must
 * have the same bits. See run.sh. */
#include <float.h>

#include "problem.h"

typedef struct {
  problem p;
  kv_observers rows;
  int64_t C;
} observed;

/* plain: causal rows, all of which observe, and no optional argument */
static observed make_observed(kv_dtype dtype, int64_t R, int64_t S, int64_t longest, int plain) {
  observed x = {.p = make(dtype, R, S, longest, 1), .C = longest + S + below(9)};
  const problem *p = &x.p;
  const int64_t heads = p->B * p->H, wide = R + 3;
  int32_t *row_first = need((size_t)p->B, sizeof *row_first);
  for (int64_t b = 0; b < p->B; b++) row_first[b] = (int32_t)(plain || below(2) ? 0 : below(R + 1));
  x.rows = (kv_observers){.dtype = dtype, .B = p->B, .H = p->H, .Hkv = p->Hkv, .R = R, .S = S, .D = p->D};
  x.rows.scale = p->scale, x.rows.softcap = p->softcap, x.rows.causal = plain || below(2);
  x.rows.q = p->q, x.rows.row_first = row_first, x.rows.sinks = p->sinks;
  x.rows.slots = p->slots, x.rows.chunk = p->chunk, x.rows.stop = p->stop;
  memcpy(x.rows.q_stride, p->q_stride, sizeof p->q_stride);
  if (below(2) && !plain) {
    float *lse = nans(heads * wide);
    for (int64_t i = 0; i < heads * R; i++)
      lse[i / R * wide + i % R] = below(9) ? (float)(6 + 2 * normal()) : below(4) ? -INFINITY : NAN;
    x.rows.lse = lse, x.rows.lse_stride[1] = wide, x.rows.lse_stride[0] = p->H * wide;
  }
  if (below(2) && !plain) {
    float *weight = nans(heads * wide);
    for (int64_t i = 0; i < heads * R; i++) weight[i / R * wide + i % R] = below(99) ? (float)normal() : NAN;
    x.rows.weight = weight, x.rows.weight_stride[1] = wide, x.rows.weight_stride[0] = p->H * wide;
  }
  return x;
}

static void drop_observed(observed *x) {
  free((void *)x->rows.row_first), free((void *)x->rows.lse), free((void *)x->rows.weight);
  drop(&x->p);
}

static int64_t alive(const problem *p, int64_t head) {
  return p->slots.len[head] + p->stop[head / p->Hkv] - p->chunk.first[head / p->Hkv];
}

/* a [seen] of row r of query head h over n slots; *error: a bound of its relative error. Returns how many it sees. */
static int64_t weights(const observed *x, int64_t b, int64_t h, int64_t r, int64_t n, double *a, double *error) {
  const kv_observers *rows = &x->rows;
  int64_t seen = rows->causal ? n - rows->R + r + 1 : n;
  if (seen < 0) seen = 0;
  double lse;
  *error = 1e-6;
  for (int64_t i = 0; i < seen; i++) a[i] = logit_of(&x->p, b, h, r, i, error);
  if (rows->lse) {
    lse = rows->lse[b * rows->lse_stride[0] + h * rows->lse_stride[1] + r];
    for (int64_t i = 0; i < seen; i++) a[i] = exp(a[i] - lse);
  } else {
    lse = softmax(a, seen, rows->sinks ? rows->sinks[h] : -INFINITY);
  }
  *error = 2 * (*error + 2e-7 * (isfinite(lse) ? fabs(lse) : 0));
  return lse == -INFINITY ? 0 : seen;
}

static double weight_of(const observed *x, int64_t b, int64_t h, int64_t r) {
  const kv_observers *rows = &x->rows;
  return rows->weight ? rows->weight[b * rows->weight_stride[0] + h * rows->weight_stride[1] + r] : 1;
}

/* Terms of one row, and a bound of each one's error. */
typedef struct {
  const observed *x;
  const kv_score *score; /* or */
  const kv_error *error;
  const double *o; /* [B, R, H, D] */
} formula;

static void score_terms(const formula *f, double w, int64_t seen, double error, double *a, double *slack) {
  for (int64_t i = 0; i < seen; i++) {
    const kv_term kind = f->score->term;
    const double entropy = a[i] > 0 ? -a[i] * log(a[i]) : a[i];
    const double term = kind == KV_ENTROPY ? entropy : kind == KV_SQUARE ? a[i] * a[i] : a[i];
    slack[i] = 2 * error * fabs(w) * (fabs(term) + (kind == KV_ENTROPY ? a[i] : 0)), a[i] = w * term;
  }
}

/* a / (1 - a) has the slope 1 / (1 - a)^2. Where the error of a is as large as 1 - a, the term may have any value up to
 * the clamp; where a is clearly over 1, both sides are at the clamp. */
static void error_terms(const formula *f, int64_t b, int64_t h, int64_t r, double w, int64_t seen, double error,
                        double *a, double *slack) {
  const problem *p = &f->x->p;
  const int edie = f->error->kind == KV_EDIE, two = f->error->kind == KV_L2;
  const double all = edie ? 1 + (double)f->error->alpha : 1, *o = f->o + ((b * p->T + r) * p->H + h) * p->D;
  for (int64_t i = 0; i < seen; i++) {
    const double *v = p->vs + ((b * p->Hkv + h / p->G) * p->most + i) * p->D;
    const double left = fmax(all - a[i], 1e-6), off = error * a[i];
    double size = 0;
    for (int64_t d = 0; d < p->D; d++) {
      const double by = v[d] - o[d];
      size += edie ? fabs(v[d]) + fabs(o[d]) : two ? by * by : fabs(by);
    }
    size = fabs(w) * (two ? sqrt(size) : size);
    slack[i] = a[i] - off > all ? error * a[i] / left * size : all * off / (left * left) * size;
    if (off > left / 4 && a[i] - off <= all) slack[i] = (a[i] + off) / 1e-6 * size;
    a[i] = (w < 0 ? -size : isnan(w) ? NAN : size) * a[i] / left;
    slack[i] += 1e-5 * fabs(a[i]) + ldexp(1, -126) * size / fmax(left, 1e-6); /* smaller weights are 0 */
  }
}

/* The expected result of one query head: want [n], tolerance [n]. */
static void reduced(const formula *f, int64_t b, int64_t h, int64_t n, double *want, double *tolerance) {
  const kv_observers *rows = &f->x->rows;
  const kv_reduce reduce = f->score ? f->score->reduce : KV_SUM;
  const int64_t from = rows->row_first[b];
  const double over = reduce == KV_MEAN && rows->R > from ? (double)(rows->R - from) : 1;
  double *a = need((size_t)n, sizeof *a), *slack = need((size_t)n, sizeof *a), error;
  for (int64_t i = 0; i < n; i++) want[i] = 0, tolerance[i] = 1e-36;
  for (int64_t r = from; r < rows->R; r++) {
    const int64_t seen = weights(f->x, b, h, r, n, a, &error);
    const double w = weight_of(f->x, b, h, r);
    if (f->score) score_terms(f, w, seen, error, a, slack);
    if (f->error) error_terms(f, b, h, r, w, seen, error, a, slack);
    for (int64_t i = 0; i < seen; i++) {
      want[i] = reduce != KV_MAX ? want[i] + a[i] / over : isnan(want[i]) || want[i] > a[i] ? want[i] : a[i];
      tolerance[i] += isfinite(slack[i]) ? slack[i] / over : 0;
    }
  }
  free(a), free(slack);
}

/* Checks out against the formula. plain: over thousands of rows errors average out, so the bound is 1e-5 of the sum. */
static void check_slots(const formula *f, kv_reduce group, const float *out, int plain, const char *what) {
  const problem *p = &f->x->p;
  const int64_t C = f->x->C, G = p->G;
  double *want = need((size_t)(G * C), sizeof *want), *tolerance = need((size_t)(G * C), sizeof *want);
  for (int64_t head = 0; head < p->B * p->Hkv; head++) {
    const int64_t n = alive(p, head), results = group == KV_NONE ? G : 1;
    for (int64_t g = 0; g < G; g++)
      reduced(f, head / p->Hkv, head % p->Hkv * G + g, n, want + g * C, tolerance + g * C);
    for (int64_t i = 0, g; i < results * C; i++, out++) {
      double x = want[i], slack = tolerance[i];
      for (g = 1; g < G && group != KV_NONE; g++) {
        const double y = want[g * C + i];
        x = group != KV_MAX ? x + y : isnan(x) || x > y ? x : y;
        slack += tolerance[g * C + i];
      }
      if (group == KV_MEAN) x /= (double)G, slack /= (double)G;
      if (plain && !p->wild && !p->huge && p->softcap == 0) slack = fmin(slack, 1e-5 * x + 1e-36);
      if (i % C >= n)
        check(*out == 0, "not 0 after n");
      else if (fabs(x) > ldexp(1, 120) || slack > ldexp(1, 120))
        check(!(fabsf(*out) < ldexpf(1, 100)) || slack > fabs(x) / 4, "a sum that overflows");
      else
        check_close(*out, x, slack, what, i);
    }
  }
  free(want), free(tolerance);
}

static kv_reduce any_group(void) { return (kv_reduce)below(4); }

static void test_score(kv_dtype dtype, int64_t R, int64_t S, int64_t longest, int plain) {
  observed x = make_observed(dtype, R, S, longest, plain);
  kv_score a = {x.rows, x.C, plain ? KV_A : (kv_term)below(3), KV_SUM, plain ? KV_MEAN : any_group(), NULL};
  if (!plain) a.reduce = (kv_reduce)below(x.rows.weight || a.term == KV_ENTROPY ? 2 : 3);
  const int64_t outs = x.p.B * (a.group == KV_NONE ? x.p.H : x.p.Hkv) * x.C;
  float *out[2] = {nans(outs), nans(outs)};
  for (int i = 0; i < 2; i++) {
    a.out = out[i];
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_score_cpu(&a) == KV_OK, "score status");
  }
  check_same(out[0], out[1], outs, "score, serial and parallel");
  check_slots(&(formula){&x, &a, NULL, NULL}, a.group, out[0], plain, "score");
  free(out[0]), free(out[1]);
  drop_observed(&x);
}

static void test_error(kv_dtype dtype, int64_t R, int64_t S, int64_t longest) {
  observed x = make_observed(dtype, R, S, longest, 0);
  const problem *p = &x.p;
  kv_error a = {.rows = x.rows, .C = x.C, .kind = (kv_error_kind)below(3), .group = any_group()};
  const int64_t outs = p->B * (a.group == KV_NONE ? p->H : p->Hkv) * x.C, rows = p->B * R * p->H;
  float *out[2] = {nans(outs), nans(outs)};
  double *o = need((size_t)(rows * p->D), sizeof *o);
  a.alpha = below(2) ? 0 : 0.1f;
  a.o = strided(dtype, (int64_t[]){p->B, R, p->H}, p->D, 1, a.o_stride);
  for (int64_t i = 0; i < rows * p->D; i++) {
    const int64_t row = i / p->D, t = row / p->H;
    o[i] = get(dtype, a.o, t / R * a.o_stride[0] + t % R * a.o_stride[1] + row % p->H * a.o_stride[2] + i % p->D);
  }
  for (int i = 0; i < 2; i++) {
    a.out = out[i];
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_error_cpu(&a) == KV_OK, "error status");
  }
  check_same(out[0], out[1], outs, "error, serial and parallel");
  check_slots(&(formula){&x, NULL, &a, o}, a.group, out[0], 0, "error");
  free(out[0]), free(out[1]), free(o), discard(a.o);
  drop_observed(&x);
}

static void test_peak(kv_dtype dtype, int64_t R, int64_t S, int64_t longest) {
  observed x = make_observed(dtype, R, S, longest, 0);
  const problem *p = &x.p;
  const int64_t outs = p->B * p->H * R, heads = p->B * p->Hkv;
  float *out[2] = {nans(outs), nans(outs)};
  int32_t *lo = need((size_t)heads, sizeof *lo), *hi = need((size_t)heads, sizeof *hi);
  for (int64_t i = 0; i < heads; i++) {
    lo[i] = (int32_t)(below(2) ? 0 : below(alive(p, i) + 1));
    hi[i] = (int32_t)(below(2) ? alive(p, i) : lo[i] + below(alive(p, i) - lo[i] + 1));
  }
  for (int i = 0; i < 2; i++) {
    const kv_peak a = {x.rows, lo, hi, out[i]};
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_peak_cpu(&a) == KV_OK, "peak status");
  }
  check_same(out[0], out[1], outs, "peak, serial and parallel");
  double *a = need((size_t)(longest + S), sizeof *a), error;
  for (int64_t i = 0; i < outs; i++) {
    const int64_t b = i / R / p->H, h = i / R % p->H, at = b * p->Hkv + h / p->G, n = alive(p, at);
    const int64_t seen = i % R < x.rows.row_first[b] ? 0 : weights(&x, b, h, i % R, n, a, &error);
    double top = 0;
    for (int64_t c = lo[at]; c < hi[at] && c < seen; c++) top = isnan(top) || top > a[c] ? top : a[c];
    if (top > ldexp(1, 120))
      check(out[0][i] > ldexpf(1, 119), "peak that overflows");
    else
      check_close(out[0][i], top, seen ? error * top + 1e-36 : 1e-36, "peak", i);
  }
  free(out[0]), free(out[1]), free(lo), free(hi), free(a);
  drop_observed(&x);
}

static void check_refined(const problem *p, const kv_refine *a, int64_t head, const float *out) {
  const int64_t n = alive(p, head), D = p->D;
  const double *v = p->vs + head * p->most * D;
  double mean[KV_MOST_D] = {0}, sum = 0, size = 0;
  for (int64_t i = 0; i < n; i++) sum += a->score[head * a->C + i];
  for (int64_t i = 0; i < n; i++)
    for (int64_t d = 0; d < D; d++)
      mean[d] += (a->fast || sum == 0 ? 1 / (double)n : a->score[head * a->C + i] / sum) * v[i * D + d];
  for (int64_t d = 0; d < D; d++) size += mean[d] * mean[d];
  for (int64_t i = 0; i < n; i++) {
    const double share = sum == 0 ? 1 / (double)n : a->score[head * a->C + i] / sum, left = 1 - share;
    double by = 0, own = 0;
    for (int64_t d = 0; d < D; d++) by += pow(v[i * D + d] - mean[d], 2), own += v[i * D + d] * v[i * D + d];
    const double off = sqrt(own) + sqrt(size),
                 slack = 1e-5 * share / (left * left) * (a->squared ? 2 * off * off : off);
    if (left < 1e-6)
      check(out[i] == FLT_MAX, "refine of a slot with all of the mass");
    else
      check_close(out[i], share / left * (a->squared ? by : sqrt(by)), slack + 1e-36, "refine", i);
  }
  for (int64_t c = n; c < a->C; c++) check(out[c] == 0, "refine not 0 after n");
}

static void test_refine(kv_dtype dtype, int64_t S, int64_t longest) {
  problem p = make(dtype, 1, S, longest, 1);
  const int64_t C = longest + S + below(9), heads = p.B * p.Hkv;
  float *out[2] = {nans(heads * C), nans(heads * C)}, *score = nans(heads * C);
  for (int64_t i = 0; i < heads; i++)
    for (int64_t c = 0, kind = below(4), n = alive(&p, i), best = below(n); c < n; c++)
      score[i * C + c] = kind == 0 ? 0 : kind == 1 ? c == best : (float)fabs(normal());
  kv_refine a = {dtype, p.B, p.Hkv, S, p.D, C, (int)below(2), (int)below(2), score, p.slots, p.chunk, p.stop, NULL};
  for (int i = 0; i < 2; i++) {
    a.out = out[i];
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_refine_cpu(&a) == KV_OK, "refine status");
  }
  check_same(out[0], out[1], heads * C, "refine, serial and parallel");
  for (int64_t i = 0; i < heads; i++) check_refined(&p, &a, i, out[0] + i * C);
  free(out[0]), free(out[1]), free(score);
  drop(&p);
}

static void test_norm(kv_dtype dtype, int64_t S, int64_t longest) {
  problem p = make(dtype, 1, S, longest, 1);
  const int64_t C = longest + S + below(9), heads = p.B * p.Hkv;
  float *out[2] = {nans(heads * C), nans(heads * C)};
  kv_norm a = {dtype, p.B, p.Hkv, S, p.D, C, 1 + (int)below(2), p.slots, p.chunk, p.stop, NULL};
  for (int i = 0; i < 2; i++) {
    a.out = out[i];
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_norm_cpu(&a) == KV_OK, "norm status");
  }
  check_same(out[0], out[1], heads * C, "norm, serial and parallel");
  for (int64_t i = 0; i < heads * C; i++) {
    const double *k = p.ks + (i / C * p.most + i % C) * p.D;
    double want = 0;
    for (int64_t d = 0; d < p.D && i % C < alive(&p, i / C); d++) want += a.p == 1 ? fabs(k[d]) : k[d] * k[d];
    want = a.p == 1 ? want : sqrt(want);
    check_close(out[0][i], want, 4e-6 * want, "norm", i);
  }
  free(out[0]), free(out[1]);
  drop(&p);
}

static void test_quadratic(kv_dtype dtype, int64_t S, int64_t longest) {
  problem p = make(dtype, 1, S, longest, 1);
  const int64_t D = p.D, C = longest + S + below(9), heads = p.B * p.H, per_head = below(2) ? D * (D + 3) : 0;
  float *out[2] = {nans(heads * C), nans(heads * C)}, *linear = nans(heads * D), *matrix = nans(heads * D * (D + 3));
  for (int64_t i = 0; i < heads * D * (D + 3); i++)
    if (i % (D + 3) < D) matrix[i] = (float)normal();
  for (int64_t i = 0; i < heads * D; i++) linear[i] = (float)normal();
  kv_quadratic a = {dtype,
                    p.B,
                    p.H,
                    p.Hkv,
                    S,
                    D,
                    C,
                    p.slots,
                    p.chunk,
                    p.stop,
                    matrix,
                    {p.H * per_head, per_head, D + 3},
                    below(2) ? linear : NULL,
                    {p.H * D, D},
                    NULL};
  for (int i = 0; i < 2; i++) {
    a.out = out[i];
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_quadratic_cpu(&a) == KV_OK, "quadratic status");
  }
  check_same(out[0], out[1], heads * C, "quadratic, serial and parallel");
  for (int64_t i = 0; i < heads * C; i++) {
    const int64_t head = i / C, at = head / p.H * p.Hkv + head % p.H / p.G, c = i % C;
    const double *x = p.ks + (at * p.most + c) * D;
    double want = 0, size = 0;
    for (int64_t r = 0; r < D && c < alive(&p, at); r++) {
      double y = a.linear ? linear[head * D + r] : 0, terms = fabs(y);
      for (int64_t d = 0; d < D; d++) {
        const double term = matrix[head * per_head + r * (D + 3) + d] * x[d];
        y += term, terms += fabs(term);
      }
      want += x[r] * y, size += fabs(x[r]) * terms;
    }
    check_close(out[0][i], want, 4e-6 * size, "quadratic", i);
  }
  free(out[0]), free(out[1]), free(linear), free(matrix);
  drop(&p);
}

static void test_refusals(void) {
  int32_t len = 1, first = 0, stop = 1, one = 1;
  const int64_t offset = 0;
  kv_observers rows = {.B = 1, .H = 1, .Hkv = 1, .D = 8, .S = 1};
  rows.slots.offset = &offset, rows.slots.len = &len, rows.chunk.first = &first;
  rows.stop = &stop, rows.row_first = &first;
  kv_score s = {.rows = rows, .C = 1};
  check(kv_score_cpu(&s) == KV_BAD_COUNT, "more slots than C");
  s.C = 2, stop = 2, check(kv_score_cpu(&s) == KV_BAD_COUNT, "stop beyond S");
  stop = 1, len = -1, check(kv_score_cpu(&s) == KV_BAD_COUNT, "len negative");
  len = 1, s.reduce = (kv_reduce)7, check(kv_score_cpu(&s) == KV_BAD_DTYPE, "reduction");
  s.reduce = KV_NONE, check(kv_score_cpu(&s) == KV_BAD_DTYPE, "rows that are not reduced");
  float weight = 1;
  s.reduce = KV_MAX, s.rows.weight = &weight, check(kv_score_cpu(&s) == KV_BAD_DTYPE, "weight of a maximum");
  s.rows.weight = NULL, s.term = KV_ENTROPY, check(kv_score_cpu(&s) == KV_BAD_DTYPE, "entropy of a maximum");
  s.reduce = KV_SUM, s.term = (kv_term)3, check(kv_score_cpu(&s) == KV_BAD_DTYPE, "term");
  kv_error e = {.rows = rows, .C = 2, .kind = (kv_error_kind)3};
  check(kv_error_cpu(&e) == KV_BAD_DTYPE, "kind");
  e.kind = KV_L1, e.group = (kv_reduce)4, check(kv_error_cpu(&e) == KV_BAD_DTYPE, "group");
  kv_peak k = {.rows = rows, .lo = &one, .hi = &first};
  check(kv_peak_cpu(&k) == KV_BAD_COUNT, "lo over hi");
  one = 3, k.lo = &first, k.hi = &one, check(kv_peak_cpu(&k) == KV_BAD_COUNT, "hi over n");
  kv_refine r = {.B = 1, .Hkv = 1, .S = 1, .D = 8, .C = 1, .slots = rows.slots, .chunk = rows.chunk, .stop = &stop};
  check(kv_refine_cpu(&r) == KV_BAD_COUNT, "refine: more slots than C");
  kv_norm m = {.B = 1, .Hkv = 1, .S = 1, .D = 8, .C = 2, .slots = rows.slots, .chunk = rows.chunk, .stop = &stop};
  check(kv_norm_cpu(&m) == KV_BAD_DTYPE, "p");
}

static int test_isa(void) {
  static const int64_t lengths[] = {0, 1, 2, 5, 17, 33, 50, 97, 130}, slots[] = {0, 1, 3, 40, 64, 255, 300, 600};
  const int n = rounds(90);
  int before = failures;
  for (int i = 0; i < n; i++)
    test_score((kv_dtype)(i % 3), one_of(9, lengths), one_of(9, lengths), one_of(8, slots), 0);
  for (int i = 0; i < 2; i++) test_score(KV_F32, 1000, 1000, 100, 1);
  report("score", before), before = failures;
  for (int i = 0; i < n; i++) test_error((kv_dtype)(i % 3), one_of(9, lengths), one_of(9, lengths), one_of(8, slots));
  report("error", before), before = failures;
  for (int i = 0; i < n; i++) test_peak((kv_dtype)(i % 3), one_of(9, lengths), one_of(9, lengths), one_of(8, slots));
  report("peak", before), before = failures;
  for (int i = 0; i < n; i++) test_refine((kv_dtype)(i % 3), one_of(9, lengths), one_of(8, slots));
  report("refine", before), before = failures;
  for (int i = 0; i < n; i++) test_norm((kv_dtype)(i % 3), one_of(9, lengths), one_of(8, slots));
  report("norm", before), before = failures;
  for (int i = 0; i < n; i++) test_quadratic((kv_dtype)(i % 3), one_of(9, lengths), one_of(8, slots));
  report("quadratic", before), before = failures;
  test_refusals();
  report("others", before);
  return failures > 0;
}

int main(void) { return run_isas(test_isa); }
