/* attend, score and decode on every instruction set of this processor against loops in double, written straight from the
 * comments of kvevict.h. Random shapes, strides and dtypes; whatever may not be read is NaN, outputs start as NaN; each
 * result is asked for again with threads and must be the same bit for bit. See run.sh.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "half.h"

/* ---- random numbers, threads, checks ---- */

static uint64_t seed = 1;

static uint64_t random_bits(void) {
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return seed * 0x2545f4914f6cdd1dull >> 16;
}

static int64_t below(int64_t n) { return n > 0 ? (int64_t)(random_bits() % (uint64_t)n) : 0; }
static double uniform(void) { return (double)below(1 << 24) / (1 << 24) * 2 - 1; }
static double normal(void) { return (uniform() + uniform() + uniform()); }
static int64_t one_of(int n, const int64_t *x) { return x[below(n)]; }

typedef struct {
  kv_body body;
  void *ctx;
  int64_t begin, end;
} share;

static void *run_share(void *x) {
  const share *s = x;
  s->body(s->ctx, s->begin, s->end);
  return NULL;
}

static void threads_hook(int64_t n, int64_t grain, kv_body body, void *ctx) {
  enum { THREADS = 3 };
  pthread_t thread[THREADS];
  share shares[THREADS];
  (void)grain;
  for (int i = 0; i < THREADS; i++) {
    shares[i] = (share){body, ctx, n * i / THREADS, n * (i + 1) / THREADS};
    if (pthread_create(&thread[i], NULL, run_share, &shares[i])) abort();
  }
  for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
}

static int failures;
static double worst; /* of error / tolerance, over one op */

static void check(int ok, const char *what) {
  if (!ok && failures++ < 20) printf("  FAIL %s\n", what);
}

static void check_close(double got, double want, double tolerance, const char *what, int64_t at) {
  if (isnan(got) && isnan(want)) return;
  if (got == want) return;
  const double error = fabs(got - want) / tolerance;
  if (error > worst) worst = error;
  if (!(error <= 1) && failures++ < 20)
    printf("  FAIL %s[%lld]: got %.9g want %.9g tolerance %.3g\n", what, (long long)at, got, want, tolerance);
}

static void check_same(const float *x, const float *y, int64_t n, const char *what) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; i++) bad += kv_bits(x[i]) != kv_bits(y[i]) && !(isnan(x[i]) && isnan(y[i]));
  check(bad == 0, what);
}

static void *need(size_t n, size_t size) {
  void *x = calloc(n ? n : 1, size);
  if (!x) abort();
  return x;
}

static float *nans(int64_t n) {
  float *x = need((size_t)n, sizeof *x);
  for (int64_t i = 0; i < n; i++) x[i] = NAN;
  return x;
}

/* ---- tensors ---- */

static double decode_half(kv_dtype dtype, uint16_t u) {
  const int digits = dtype == KV_F16 ? 10 : 7, bias = dtype == KV_F16 ? 15 : 127, top = 2 * bias + 1;
  const int exponent = (u & 0x7fff) >> digits, fraction = u & ((1 << digits) - 1);
  const double sign = u & 0x8000 ? -1 : 1;
  if (exponent == top) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexp(fraction, 1 - bias - digits);
  return sign * ldexp(fraction + (1 << digits), exponent - bias - digits);
}

static double get(kv_dtype dtype, const void *x, int64_t i) {
  return dtype == KV_F32 ? (double)((const float *)x)[i] : decode_half(dtype, ((const uint16_t *)x)[i]);
}

static void put(kv_dtype dtype, void *x, int64_t i, double value) {
  const float f = (float)value;
  kv_store_row(dtype, &f, (char *)x + i * kv_size(dtype), 1);
}

/* n numbers of dtype; NaN until they are set */
static void *numbers(kv_dtype dtype, int64_t n) {
  void *x = need((size_t)n, (size_t)kv_size(dtype));
  for (int64_t i = 0; i < n; i++) put(dtype, x, i, NAN);
  return x;
}

/* [n0, n1, n2, D] with the first three dimensions in random order and gaps between rows */
static void *strided(kv_dtype dtype, const int64_t n[3], int64_t D, double size, int64_t stride[3]) {
  static const int orders[4][3] = {{2, 1, 0}, {1, 2, 0}, {2, 0, 1}, {0, 1, 2}};
  const int *order = orders[below(4)];
  int64_t step = D + 8 * below(3);
  for (int i = 0; i < 3; i++) stride[order[i]] = step, step *= n[order[i]] ? n[order[i]] : 1;
  void *x = numbers(dtype, step);
  for (int64_t i = 0; i < n[0] * n[1] * n[2]; i++) {
    const int64_t at = i / n[2] / n[1] * stride[0] + i / n[2] % n[1] * stride[1] + i % n[2] * stride[2];
    for (int64_t d = 0; d < D; d++) put(dtype, x, at + d, size * normal());
  }
  return x;
}

/* ---- a random problem, common to the three ops ---- */

typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, G, T, S, D, rows;
  float scale, softcap, *sinks;
  int wild, huge; /* NaN and inf among keys and values; logits up to 1e4 */
  void *q;
  int64_t q_stride[3];
  kv_slots slots;
  kv_new fresh;
  int32_t *stop;
  int64_t most;         /* alive slots of a head, at most */
  double *qs, *ks, *vs; /* [B, H, T, D], [B, Hkv, most, D]: what was written, as the reference reads it */
} problem;

/* One number of a key or value becomes NaN or inf. */
static void spoil(const problem *p, void *x, int64_t at) {
  put(p->dtype, x, at + below(p->D), below(2) ? NAN : below(2) ? INFINITY : -INFINITY);
}

static void make_slots(problem *p, int64_t longest) {
  const int64_t heads = p->B * p->Hkv;
  int64_t *offset = need((size_t)heads, sizeof *offset);
  int32_t *len = need((size_t)heads, sizeof *len);
  p->rows = 0;
  for (int64_t i = 0; i < heads; i++) {
    len[i] = (int32_t)(below(4) ? below(longest + 1) : longest * below(2));
    offset[i] = p->rows + below(3);
    p->rows = offset[i] + len[i] + 1 + below(5);
  }
  p->slots = (kv_slots){numbers(p->dtype, p->rows * p->D), numbers(p->dtype, p->rows * p->D), NULL, offset, len};
  p->slots.pos = need((size_t)p->rows, sizeof *p->slots.pos);
  for (int64_t i = 0; i < heads; i++)
    for (int64_t j = offset[i] * p->D; j < (offset[i] + len[i]) * p->D; j++)
      put(p->dtype, p->slots.k, j, normal()), put(p->dtype, p->slots.v, j, normal());
}

/* Key (or value) d of alive slot i of head (b, h) */
static double at_slot(const problem *p, const void *stored, const void *fresh, const int64_t *stride, int64_t b,
                      int64_t h, int64_t i, int64_t d) {
  const int64_t at = b * p->Hkv + h, len = p->slots.len[at];
  if (i < len) return get(p->dtype, stored, (p->slots.offset[at] + i) * p->D + d);
  return get(p->dtype, fresh, b * stride[0] + h * stride[1] + (i - len + p->fresh.first[b]) * stride[2] + d);
}

static void gather(problem *p) {
  const int64_t D = p->D, heads = p->B * p->Hkv;
  p->qs = need((size_t)(p->B * p->H * p->T * D), sizeof *p->qs);
  p->ks = need((size_t)(heads * p->most * D), sizeof *p->ks);
  p->vs = need((size_t)(heads * p->most * D), sizeof *p->vs);
  for (int64_t i = 0; i < p->B * p->H * p->T * D; i++) {
    const int64_t row = i / D, head = row / p->T;
    p->qs[i] = get(p->dtype, p->q,
                   head / p->H * p->q_stride[0] + head % p->H * p->q_stride[1] + row % p->T * p->q_stride[2] + i % D);
  }
  for (int64_t i = 0; i < heads; i++)
    for (int64_t j = 0, b = i / p->Hkv, n = p->slots.len[i] + p->S - p->fresh.first[b]; j < n * D; j++) {
      const int64_t to = i * p->most * D + j;
      p->ks[to] = at_slot(p, p->slots.k, p->fresh.k, p->fresh.k_stride, b, i % p->Hkv, j / D, j % D);
      p->vs[to] = at_slot(p, p->slots.v, p->fresh.v, p->fresh.v_stride, b, i % p->Hkv, j / D, j % D);
    }
}

static problem make(kv_dtype dtype, int64_t T, int64_t S, int64_t longest, int padded) {
  static const int64_t groups[] = {1, 1, 2, 3, 4, 7, 8},
                       dims[] = {8, 16, 24, 40, 48, 64, 64, 80, 96, 128, 128, 200, 256};
  problem p = {.dtype = dtype, .B = 1 + below(3), .Hkv = 1 + below(3), .G = one_of(7, groups), .T = T, .S = S};
  p.H = p.G * p.Hkv, p.D = one_of(13, dims);
  p.huge = below(8) == 0;
  p.scale = (float)(1 / sqrt((double)p.D));
  p.softcap = below(3) ? 0 : (float)(1 + below(50));
  p.q = strided(dtype, (int64_t[]){p.B, p.H, T}, p.D, p.huge ? 300 : 1, p.q_stride);
  make_slots(&p, longest);
  p.fresh.k = strided(dtype, (int64_t[]){p.B, p.Hkv, S}, p.D, 1, p.fresh.k_stride);
  p.fresh.v = strided(dtype, (int64_t[]){p.B, p.Hkv, S}, p.D, 1, p.fresh.v_stride);
  int32_t *first = need((size_t)p.B, sizeof *first), *pos = need((size_t)(p.B * S), sizeof *pos);
  p.stop = need((size_t)p.B, sizeof *p.stop);
  for (int64_t i = 0; i < p.B * S; i++) pos[i] = (int32_t)below(1 << 20);
  for (int64_t b = 0; b < p.B; b++) {
    first[b] = (int32_t)(below(2) && padded ? below(S + 1) : 0);
    p.stop[b] = (int32_t)(below(2) ? S : first[b] + below(S - first[b] + 1));
    for (int64_t i = 0; i < p.Hkv * first[b]; i++) { /* left padding is never read */
      const int64_t h = i / first[b], s = i % first[b];
      for (int64_t d = 0; d < p.D; d++) {
        put(dtype, (void *)p.fresh.k, b * p.fresh.k_stride[0] + h * p.fresh.k_stride[1] + s * p.fresh.k_stride[2] + d,
            NAN);
        put(dtype, (void *)p.fresh.v, b * p.fresh.v_stride[0] + h * p.fresh.v_stride[1] + s * p.fresh.v_stride[2] + d,
            NAN);
      }
    }
  }
  p.fresh.first = first, p.fresh.pos = pos;
  if (below(3) == 0) {
    p.sinks = need((size_t)p.H, sizeof *p.sinks);
    for (int64_t h = 0; h < p.H; h++) p.sinks[h] = below(5) ? (float)(4 * normal()) : -INFINITY;
  }
  p.wild = !p.huge && below(4) == 0;
  for (int64_t i = 0, n = p.wild ? 1 + below(3) : 0; i < n; i++) {
    const int64_t b = below(p.B), h = below(p.Hkv), at = b * p.Hkv + h;
    if (S > 0 && below(2))
      spoil(&p, (void *)p.fresh.v, b * p.fresh.v_stride[0] + h * p.fresh.v_stride[1] + below(S) * p.fresh.v_stride[2]);
    else if (S > 0 && below(2))
      spoil(&p, (void *)p.fresh.k, b * p.fresh.k_stride[0] + h * p.fresh.k_stride[1] + below(S) * p.fresh.k_stride[2]);
    else if (p.slots.len[at] > 0)
      spoil(&p, below(2) ? p.slots.k : p.slots.v, (p.slots.offset[at] + below(p.slots.len[at])) * p.D);
  }
  p.most = longest + S;
  gather(&p);
  return p;
}

static void drop(problem *p) {
  void *all[] = {p->q,
                 p->slots.k,
                 p->slots.v,
                 p->slots.pos,
                 (void *)p->slots.offset,
                 p->sinks,
                 (void *)p->fresh.k,
                 (void *)p->fresh.v,
                 (void *)p->fresh.first,
                 (void *)p->fresh.pos,
                 p->stop,
                 (void *)p->slots.len,
                 p->qs,
                 p->ks,
                 p->vs};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* ---- the contract in double ---- */

/* Logit of row t of query head h at slot i; *error gains what fp32 may be off by. */
static double logit_of(const problem *p, int64_t b, int64_t h, int64_t t, int64_t i, double *error) {
  const double *q = p->qs + ((b * p->H + h) * p->T + t) * p->D;
  const double *k = p->ks + ((b * p->Hkv + h / p->G) * p->most + i) * p->D;
  double x = 0, size = 0;
  for (int64_t d = 0; d < p->D; d++) x += q[d] * k[d], size += fabs(q[d] * k[d]);
  x *= p->scale, size *= p->scale;
  if (p->softcap > 0) x = p->softcap * tanh(x / p->softcap), size += 4 * p->softcap;
  if (isfinite(size)) *error = fmax(*error, 4e-7 * size);
  return x;
}

/* s [n] logits -> probabilities; returns lse. A sink is one more logit. */
static double softmax(double *s, int64_t n, double sink) {
  double m = sink, l = 0;
  for (int64_t i = 0; i < n; i++) m = s[i] > m ? s[i] : m;
  const double at = m == -INFINITY ? 0 : m;
  for (int64_t i = 0; i < n; i++) l += s[i] = exp(s[i] - at);
  l += exp(sink - at);
  for (int64_t i = 0; i < n; i++) s[i] = l == 0 ? 0 : s[i] / l;
  return at + log(l);
}

static double rounding(kv_dtype dtype) { return dtype == KV_F32 ? 2e-6 : dtype == KV_F16 ? 6e-4 : 4.5e-3; }

/* One row of attention over its first n slots against what the kernel says. */
static void check_row(const problem *p, int64_t b, int64_t h, int64_t t, int64_t n, const void *out, int64_t out_at,
                      float lse, double *s, double *error) {
  *error = 1e-6;
  for (int64_t i = 0; i < n; i++) s[i] = logit_of(p, b, h, t, i, error);
  const double want = softmax(s, n, p->sinks ? p->sinks[h] : -INFINITY);
  check_close(lse, want, *error + 3e-7 * fabs(want), "lse", (b * p->H + h) * p->T + t);
  for (int64_t d = 0; d < p->D; d++) {
    const double *v = p->vs + (b * p->Hkv + h / p->G) * p->most * p->D + d;
    double o = 0, size = 0;
    for (int64_t i = 0; i < n; i++) o += s[i] * v[i * p->D], size += s[i] * fabs(v[i * p->D]);
    check_close(get(p->dtype, out, out_at + d), o, 1e-7 + rounding(p->dtype) * fabs(o) + (2 * *error + 1e-6) * size,
                "out", out_at + d);
  }
}

/* ---- the ops ---- */

static void test_attend(kv_dtype dtype, int64_t T, int64_t S, int64_t longest) {
  problem p = make(dtype, T, S, longest, 1);
  const int64_t outs = p.B * T * p.H * p.D;
  void *out[2] = {numbers(dtype, outs), numbers(dtype, outs)};
  float *lse[2] = {nans(p.B * p.H * T), nans(p.B * p.H * T)};
  for (int i = 0; i < 2; i++) {
    kv_attend a = {dtype,     p.B, p.H, p.Hkv,   T,       S,       p.D,    p.scale,
                   p.softcap, p.q, {0}, p.slots, p.fresh, p.sinks, out[i], lse[i]};
    memcpy(a.q_stride, p.q_stride, sizeof a.q_stride);
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_attend_cpu(&a) == KV_OK, "attend status");
  }
  check(memcmp(out[0], out[1], (size_t)(outs * kv_size(dtype))) == 0 || p.wild, "attend out, serial and parallel");
  check_same(lse[0], lse[1], p.B * p.H * T, "attend lse, serial and parallel");
  double *s = need((size_t)(longest + S), sizeof *s), error;
  for (int64_t i = 0; i < p.B * p.H * T; i++) {
    const int64_t b = i / T / p.H, h = i / T % p.H, t = i % T, first = p.fresh.first[b];
    int64_t seen = t + S - T + 1 - first;
    seen = (seen < 0 ? 0 : seen > S - first ? S - first : seen) + p.slots.len[b * p.Hkv + h / p.G];
    check_row(&p, b, h, t, seen, out[0], ((b * T + t) * p.H + h) * p.D, lse[0][i], s, &error);
  }
  for (int i = 0; i < 2; i++) free(out[i]), free(lse[i]);
  free(s);
  drop(&p);
}

/* What the kernel is to find for one head: want [n], tolerance [n] */
static void score_head(const problem *p, const kv_score *a, int64_t b, int64_t h, double *want, double *tolerance) {
  const int64_t n = p->slots.len[b * p->Hkv + h] + a->stop[b] - a->fresh.first[b], R = a->R, from = a->row_first[b];
  double *s = need((size_t)n, sizeof *s), *head = need((size_t)n, sizeof *s);
  for (int64_t i = 0; i < n; i++) want[i] = 0, tolerance[i] = 1e-36;
  for (int64_t g = h * p->G; g < (h + 1) * p->G; g++) {
    for (int64_t i = 0; i < n; i++) head[i] = 0;
    for (int64_t r = from; r < R; r++) {
      double error = 1e-6, lse;
      int64_t seen = a->causal ? n - R + r + 1 : n;
      if (seen < 0) seen = 0;
      for (int64_t i = 0; i < seen; i++) s[i] = logit_of(p, b, g, r, i, &error);
      if (a->lse) {
        lse = a->lse[b * a->lse_stride[0] + g * a->lse_stride[1] + r];
        for (int64_t i = 0; i < seen; i++) s[i] = exp(s[i] - lse);
      } else {
        lse = softmax(s, seen, a->sinks ? a->sinks[g] : -INFINITY);
      }
      if (lse == -INFINITY) continue;
      error += 2e-7 * (isfinite(lse) ? fabs(lse) : 0);
      for (int64_t i = 0; i < seen; i++) {
        if (a->reduce == KV_MAX)
          head[i] = isnan(head[i]) || head[i] > s[i] ? head[i] : s[i];
        else
          head[i] += s[i];
        tolerance[i] += 2 * error * (isfinite(s[i]) ? s[i] : 0);
      }
    }
    for (int64_t i = 0; i < n; i++)
      want[i] += head[i] / (double)(p->G * (a->reduce == KV_MEAN && R > from ? R - from : 1));
  }
  free(s), free(head);
}

static void test_score(kv_dtype dtype, int64_t R, int64_t S, int64_t longest, int plain) {
  problem p = make(dtype, R, S, longest, 1);
  const int64_t C = longest + S + below(9), outs = p.B * p.Hkv * C;
  float *out[2] = {nans(outs), nans(outs)}, *lse = NULL;
  int32_t *row_first = need((size_t)p.B, sizeof *row_first);
  for (int64_t b = 0; b < p.B; b++) row_first[b] = (int32_t)(below(2) ? 0 : below(R + 1));
  kv_score a = {.dtype = dtype,
                .B = p.B,
                .H = p.H,
                .Hkv = p.Hkv,
                .R = R,
                .S = S,
                .D = p.D,
                .C = C,
                .scale = p.scale,
                .softcap = p.softcap,
                .causal = plain || below(2),
                .reduce = plain ? KV_SUM : (kv_reduce)below(3),
                .q = p.q,
                .row_first = row_first,
                .slots = p.slots,
                .fresh = p.fresh,
                .stop = p.stop,
                .sinks = p.sinks};
  memcpy(a.q_stride, p.q_stride, sizeof a.q_stride);
  if (below(2) && !plain) {
    a.lse_stride[1] = R + 3, a.lse_stride[0] = p.H * (R + 3);
    lse = nans(p.B * p.H * (R + 3));
    for (int64_t i = 0; i < p.B * p.H * R; i++)
      lse[i / R * (R + 3) + i % R] = below(9) ? (float)(6 + 2 * normal()) : below(4) ? -INFINITY : NAN;
    a.lse = lse;
  }
  for (int i = 0; i < 2; i++) {
    a.out = out[i];
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_score_cpu(&a) == KV_OK, "score status");
  }
  check_same(out[0], out[1], outs, "score, serial and parallel");
  double *want = need((size_t)C, sizeof *want), *tolerance = need((size_t)C, sizeof *want);
  for (int64_t i = 0; i < p.B * p.Hkv; i++) {
    const int64_t n = p.slots.len[i] + p.stop[i / p.Hkv] - p.fresh.first[i / p.Hkv];
    score_head(&p, &a, i / p.Hkv, i % p.Hkv, want, tolerance);
    for (int64_t c = 0; c < n; c++) {
      /* Over thousands of rows errors average out: there the bound is 1e-5 of the sum. */
      if (plain && !p.wild && !p.huge && p.softcap == 0) tolerance[c] = fmin(tolerance[c], 1e-5 * want[c] + 1e-36);
      if (want[c] > ldexp(1, 120))
        check(out[0][i * C + c] > ldexpf(1, 119), "score that overflows");
      else
        check_close(out[0][i * C + c], want[c], tolerance[c], "score", i * C + c);
    }
    for (int64_t c = n; c < C; c++) check(out[0][i * C + c] == 0, "score beyond n");
  }
  free(want), free(tolerance), free(out[0]), free(out[1]), free(lse), free(row_first);
  drop(&p);
}

static void test_decode(kv_dtype dtype, int64_t longest) {
  problem p = make(dtype, 1, 1, longest, 0);
  const int64_t C = longest + 1 + below(9), outs = p.B * p.H * p.D, bytes = p.rows * p.D * kv_size(dtype);
  void *out[2] = {numbers(dtype, outs), numbers(dtype, outs)};
  float *lse[2] = {nans(p.B * p.H), nans(p.B * p.H)}, *probs[2] = {nans(p.B * p.Hkv * C), nans(p.B * p.Hkv * C)};
  void *k = need((size_t)bytes, 1), *v = need((size_t)bytes, 1);
  const int with_probs = below(2) == 0;
  memcpy(k, p.slots.k, (size_t)bytes), memcpy(v, p.slots.v, (size_t)bytes);
  for (int64_t i = 0; i < p.B * p.Hkv; i++) /* what the buffers must hold afterwards */
    for (int64_t d = 0; d < p.D; d++) {
      const int64_t to = (p.slots.offset[i] + p.slots.len[i]) * p.D + d, b = i / p.Hkv, h = i % p.Hkv,
                    n = p.slots.len[i];
      put(dtype, k, to, at_slot(&p, NULL, p.fresh.k, p.fresh.k_stride, b, h, n, d));
      put(dtype, v, to, at_slot(&p, NULL, p.fresh.v, p.fresh.v_stride, b, h, n, d));
    }
  for (int i = 0; i < 2; i++) {
    kv_decode a = {dtype, p.B, p.H,     p.Hkv,   p.D,     C,      p.scale, p.softcap,
                   p.q,   {0}, p.fresh, p.slots, p.sinks, out[i], lse[i],  with_probs ? probs[i] : NULL};
    memcpy(a.q_stride, p.q_stride, sizeof a.q_stride);
    kv_set_parallel(i ? NULL : threads_hook, 3); /* first: a serial run leaves the new row behind */
    check(kv_decode_cpu(&a) == KV_OK, "decode status");
  }
  check(memcmp(out[0], out[1], (size_t)(outs * kv_size(dtype))) == 0 || p.wild, "decode out, serial and parallel");
  check_same(lse[0], lse[1], p.B * p.H, "decode lse, serial and parallel");
  check_same(probs[0], probs[1], p.B * p.Hkv * C, "decode probs, serial and parallel");
  check(p.wild || !memcmp(k, p.slots.k, (size_t)bytes), "decode writes the key");
  check(p.wild || !memcmp(v, p.slots.v, (size_t)bytes), "decode writes the value");
  double *s = need((size_t)longest + 1, sizeof *s), *mean = need((size_t)C, sizeof *s), error, most;
  for (int64_t i = 0; i < p.B * p.Hkv; i++) {
    const int64_t b = i / p.Hkv, n = p.slots.len[i] + 1;
    check(p.slots.pos[p.slots.offset[i] + n - 1] == p.fresh.pos[b], "decode writes pos");
    most = 0;
    for (int64_t c = 0; c < C; c++) mean[c] = 0;
    for (int64_t g = 0; g < p.G; g++) {
      const int64_t row = b * p.H + i % p.Hkv * p.G + g;
      check_row(&p, b, row % p.H, 0, n, out[0], row * p.D, lse[0][row], s, &error);
      most = fmax(most, error + 3e-7 * (isfinite(lse[0][row]) ? fabsf(lse[0][row]) : 0));
      for (int64_t c = 0; c < n; c++) mean[c] += s[c] / (double)p.G;
    }
    for (int64_t c = 0; c < C; c++) {
      if (with_probs)
        check_close(probs[0][i * C + c], mean[c], 2 * most * mean[c] + 1e-36, "probs", i * C + c);
      else
        check(isnan(probs[0][i * C + c]), "probs untouched");
    }
  }
  for (int i = 0; i < 2; i++) free(out[i]), free(lse[i]), free(probs[i]);
  free(s), free(mean), free(k), free(v);
  drop(&p);
}

/* ---- conversions, refusals ---- */

/* Every half there is, and floats between: the nearest one, the even one of two as near. */
static void test_half(kv_dtype dtype) {
  const int inf = dtype == KV_F16 ? 0x7c00 : 0x7f80;
  for (int u = 0; u < 65536; u++) {
    const uint16_t h[2] = {(uint16_t)u}; /* room for a float: kv_load_row could read one */
    float x = 0;
    uint16_t back[2] = {0};
    kv_load_row(dtype, h, &x, 1);
    kv_store_row(dtype, &x, back, 1);
    const double want = decode_half(dtype, h[0]);
    check(isnan(want) ? isnan(x) && isnan(decode_half(dtype, back[0])) : x == want && back[0] == h[0],
          "half there and back");
    if ((u & 0x7fff) >= inf) continue;
    /* between h and the next one away from 0; beyond the largest stands the power of two that does not exist */
    const double next = (u & 0x7fff) + 1 == inf ? (u & 0x8000 ? -1 : 1) * ldexp(1, dtype == KV_F16 ? 16 : 128)
                                                : decode_half(dtype, (uint16_t)(u + 1));
    const float middle = (float)((want + next) / 2), less = nextafterf(middle, 0),
                more = nextafterf(middle, next > 0 ? INFINITY : -INFINITY);
    kv_store_row(dtype, &middle, back, 1);
    check(back[0] == (u & 1 ? u + 1 : u), "half rounds to even");
    kv_store_row(dtype, &less, back, 1);
    check(back[0] == u, "half rounds down");
    kv_store_row(dtype, &more, back, 1);
    check(back[0] == u + 1, "half rounds up");
  }
}

static void test_refusals(void) {
  int32_t len = 1, first = 0, stop = 1;
  const int64_t offset = 0;
  kv_attend a = {.B = 1, .H = 4, .Hkv = 2, .D = 64};
  kv_score s = {.B = 1,
                .H = 1,
                .Hkv = 1,
                .D = 8,
                .S = 1,
                .C = 1,
                .slots = {.offset = &offset, .len = &len},
                .fresh = {.first = &first},
                .stop = &stop,
                .row_first = &first};
  a.Hkv = 3, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "H no multiple of Hkv");
  a.Hkv = 2, a.D = 60, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "D no multiple of 8");
  a.D = 264, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "D over 256");
  a.D = 64, a.T = -1, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "T negative");
  a.T = 1, a.dtype = (kv_dtype)3, check(kv_attend_cpu(&a) == KV_BAD_DTYPE, "dtype");
  check(kv_score_cpu(&s) == KV_BAD_COUNT, "more slots than C");
  s.C = 2, stop = 2, check(kv_score_cpu(&s) == KV_BAD_COUNT, "stop beyond S");
  stop = 1, len = -1, check(kv_score_cpu(&s) == KV_BAD_COUNT, "len negative");
  s.reduce = (kv_reduce)7, check(kv_score_cpu(&s) == KV_BAD_DTYPE, "reduction");
  kv_attend none = {.B = 0, .H = 4, .Hkv = 2, .D = 64};
  check(kv_attend_cpu(&none) == KV_OK, "empty batch");
}

/* ---- */

static void report(const char *op, int before) {
  printf("%-7s %-7s %s  largest error %.2f of what is allowed\n", op, kv_cpu_isa(),
         failures == before ? "ok  " : "FAIL", worst);
  fflush(stdout);
  worst = 0;
}

static int test_isa(void) {
  static const int64_t lengths[] = {0, 1, 2, 5, 17, 33, 50, 97, 130}, slots[] = {0, 1, 3, 40, 64, 255, 300, 600};
  const char *rounds = getenv("KVEVICT_TEST_ROUNDS");
  const int n = rounds ? atoi(rounds) : 90;
  int before = failures;
  for (int i = 0; i < n; i++) {
    const int64_t T = one_of(9, lengths), S = below(2) ? T : one_of(9, lengths);
    test_attend((kv_dtype)(i % 3), T, S, one_of(8, slots));
  }
  test_attend(KV_F32, 300, 300, 300);
  report("attend", before), before = failures;
  for (int i = 0; i < n; i++)
    test_score((kv_dtype)(i % 3), one_of(9, lengths), one_of(9, lengths), one_of(8, slots), 0);
  for (int i = 0; i < 2; i++) test_score(KV_F32, 1000, 1000, 100, 1);
  report("score", before), before = failures;
  for (int i = 0; i < n; i++) test_decode((kv_dtype)(i % 3), i % 5 ? one_of(8, slots) : 1500);
  report("decode", before), before = failures;
  test_half(KV_F16), test_half(KV_BF16), test_refusals();
  report("others", before);
  return failures > 0;
}

/* Each instruction set in a process of its own, since the choice is made once. */
int main(void) {
  static const char *const isas[] = {"scalar", "avx2", "avx512"};
  int failed = 0;
  for (int i = 0; i < 3; i++) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("KVEVICT_CPU_ISA", isas[i], 1);
      if (strcmp(kv_cpu_isa(), isas[i]) == 0) exit(test_isa());
      printf("%s: not on this processor\n", isas[i]);
      exit(0);
    }
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) failed = 1;
  }
  return failed;
}
