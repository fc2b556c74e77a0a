/* Shared by the tests of kernels: random problems, the contract's softmax in double, and a run of every instruction set
 * of this processor. Shapes, strides and dtypes are random; memory that must not be read is NaN. */
#ifndef PROBLEM_H
#define PROBLEM_H
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

/* How many random problems a test draws: $KVEVICT_TEST_ROUNDS, or as many as usual. */
static inline int rounds(int usual) {
  const char *asked = getenv("KVEVICT_TEST_ROUNDS");
  return asked ? atoi(asked) : usual;
}

static int failures;
static double worst; /* of error / tolerance, over one op */

static void check(int ok, const char *what) {
  if (!ok && failures++ < 20) printf("  FAIL %s\n", what);
}

static inline void check_close(double got, double want, double tolerance, const char *what, int64_t at) {
  if (isnan(got) && isnan(want)) return;
  if (got == want) return;
  const double error = fabs(got - want) / tolerance;
  if (error > worst) worst = error;
  if (!(error <= 1) && failures++ < 20)
    printf("  FAIL %s[%lld]: got %.9g want %.9g tolerance %.3g\n", what, (long long)at, got, want, tolerance);
}

/* The same bits, or NaN in the same places. */
static int same(const float *x, const float *y, int64_t n) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; i++) bad += kv_bits(x[i]) != kv_bits(y[i]) && !(isnan(x[i]) && isnan(y[i]));
  return bad == 0;
}

static void check_same(const float *x, const float *y, int64_t n, const char *what) { check(same(x, y, n), what); }

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

/* n numbers of dtype, NaN until they are set. They start 0 to 3 numbers after a multiple of 16 bytes, since kernels may
 * rely only on the alignment of one number. To be freed by discard. */
static void *numbers(kv_dtype dtype, int64_t n) {
  const int64_t start = below(4);
  char *x = need((size_t)(start + n), (size_t)kv_size(dtype));
  x += start * kv_size(dtype);
  for (int64_t i = 0; i < n; i++) put(dtype, x, i, NAN);
  return x;
}

static void discard(const void *x) { free((void *)((uintptr_t)x / 16 * 16)); }

/* [n0, n1, n2, D] with the first three dimensions in random order and gaps between rows. To be freed by discard. */
static void *strided(kv_dtype dtype, const int64_t n[3], int64_t D, double size, int64_t stride[3]) {
  static const int orders[4][3] = {{2, 1, 0}, {1, 2, 0}, {2, 0, 1}, {0, 1, 2}};
  static const int64_t gaps[] = {0, 0, 8, 16, 1, 5};
  const int *order = orders[below(4)];
  int64_t step = D + one_of(6, gaps);
  for (int i = 0; i < 3; i++) stride[order[i]] = step, step *= n[order[i]] ? n[order[i]] : 1;
  void *x = numbers(dtype, step);
  for (int64_t i = 0; i < n[0] * n[1] * n[2]; i++) {
    const int64_t at = i / n[2] / n[1] * stride[0] + i / n[2] % n[1] * stride[1] + i % n[2] * stride[2];
    for (int64_t d = 0; d < D; d++) put(dtype, x, at + d, size * normal());
  }
  return x;
}

/* ---- a random problem, common to all ops ---- */

typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, G, T, S, D, rows;
  float scale, softcap, *sinks;
  int wild, huge; /* NaN and inf among keys and values; logits up to 1e4 */
  void *q;
  int64_t q_stride[3];
  kv_slots slots;
  kv_new chunk;
  int32_t *stop;
  int64_t most;         /* alive slots of a head, at most */
  double *qs, *ks, *vs; /* [B, H, T, D], [B, Hkv, most, D]: the numbers in double, for the reference */
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
  p->slots = (kv_slots){
      .k = numbers(p->dtype, p->rows * p->D), .v = numbers(p->dtype, p->rows * p->D), .offset = offset, .len = len};
  p->slots.pos = need((size_t)p->rows, sizeof *p->slots.pos);
  for (int64_t i = 0; i < heads; i++)
    for (int64_t j = offset[i] * p->D; j < (offset[i] + len[i]) * p->D; j++)
      put(p->dtype, p->slots.k, j, normal()), put(p->dtype, p->slots.v, j, normal());
}

/* Key (or value) d of alive slot i of head (b, h) */
static double at_slot(const problem *p, const void *stored, const void *chunk, const int64_t *stride, int64_t b,
                      int64_t h, int64_t i, int64_t d) {
  const int64_t at = b * p->Hkv + h, len = p->slots.len[at];
  if (i < len) return get(p->dtype, stored, (p->slots.offset[at] + i) * p->D + d);
  return get(p->dtype, chunk, b * stride[0] + h * stride[1] + (i - len + p->chunk.first[b]) * stride[2] + d);
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
    for (int64_t j = 0, b = i / p->Hkv, n = p->slots.len[i] + p->S - p->chunk.first[b]; j < n * D; j++) {
      const int64_t to = i * p->most * D + j;
      p->ks[to] = at_slot(p, p->slots.k, p->chunk.k, p->chunk.k_stride, b, i % p->Hkv, j / D, j % D);
      p->vs[to] = at_slot(p, p->slots.v, p->chunk.v, p->chunk.v_stride, b, i % p->Hkv, j / D, j % D);
    }
}

static problem make(kv_dtype dtype, int64_t T, int64_t S, int64_t longest, int padded) {
  static const int64_t groups[] = {1, 1, 2, 3, 4, 7, 8},
                       dims[] = {8, 16, 24, 40, 48, 64, 64, 80, 96, 128, 128, 200, 256, 512};
  problem p = {.dtype = dtype, .B = 1 + below(3), .Hkv = 1 + below(3), .G = one_of(7, groups), .T = T, .S = S};
  p.D = one_of(14, dims);
  if (below(8) == 0) p.B = p.Hkv = 1, p.G = 9 + below(120), p.D = 8 * (1 + below(5)); /* up to 128 heads in a group */
  p.H = p.G * p.Hkv;
  p.huge = below(8) == 0;
  p.scale = (float)(1 / sqrt((double)p.D));
  p.softcap = below(3) ? 0 : (float)(1 + below(50));
  p.q = strided(dtype, (int64_t[]){p.B, p.H, T}, p.D, p.huge ? 300 : 1, p.q_stride);
  make_slots(&p, longest);
  p.chunk.k = strided(dtype, (int64_t[]){p.B, p.Hkv, S}, p.D, 1, p.chunk.k_stride);
  p.chunk.v = strided(dtype, (int64_t[]){p.B, p.Hkv, S}, p.D, 1, p.chunk.v_stride);
  int32_t *first = need((size_t)p.B, sizeof *first), *pos = need((size_t)(p.B * S), sizeof *pos);
  p.stop = need((size_t)p.B, sizeof *p.stop);
  for (int64_t i = 0; i < p.B * S; i++) pos[i] = (int32_t)below(1 << 20);
  for (int64_t b = 0; b < p.B; b++) {
    first[b] = (int32_t)(below(2) && padded ? below(S + 1) : 0);
    p.stop[b] = (int32_t)(below(2) ? S : first[b] + below(S - first[b] + 1));
    for (int64_t i = 0; i < p.Hkv * first[b]; i++) { /* left padding must not be read */
      const int64_t h = i / first[b], s = i % first[b];
      for (int64_t d = 0; d < p.D; d++) {
        put(dtype, (void *)p.chunk.k, b * p.chunk.k_stride[0] + h * p.chunk.k_stride[1] + s * p.chunk.k_stride[2] + d,
            NAN);
        put(dtype, (void *)p.chunk.v, b * p.chunk.v_stride[0] + h * p.chunk.v_stride[1] + s * p.chunk.v_stride[2] + d,
            NAN);
      }
    }
  }
  p.chunk.first = first, p.chunk.pos = pos;
  if (below(3) == 0) {
    p.sinks = need((size_t)p.H, sizeof *p.sinks);
    for (int64_t h = 0; h < p.H; h++) p.sinks[h] = below(5) ? (float)(4 * normal()) : -INFINITY;
  }
  p.wild = !p.huge && below(4) == 0;
  for (int64_t i = 0, n = p.wild ? 1 + below(3) : 0; i < n; i++) {
    const int64_t b = below(p.B), h = below(p.Hkv), at = b * p.Hkv + h;
    if (S > 0 && below(2))
      spoil(&p, (void *)p.chunk.v, b * p.chunk.v_stride[0] + h * p.chunk.v_stride[1] + below(S) * p.chunk.v_stride[2]);
    else if (S > 0 && below(2))
      spoil(&p, (void *)p.chunk.k, b * p.chunk.k_stride[0] + h * p.chunk.k_stride[1] + below(S) * p.chunk.k_stride[2]);
    else if (p.slots.len[at] > 0)
      spoil(&p, below(2) ? p.slots.k : p.slots.v, (p.slots.offset[at] + below(p.slots.len[at])) * p.D);
  }
  p.most = longest + S;
  gather(&p);
  return p;
}

static void drop(problem *p) {
  const void *shifted[] = {p->q, p->slots.k, p->slots.v, p->chunk.k, p->chunk.v};
  const void *all[] = {p->slots.pos, p->slots.offset, p->slots.len, p->chunk.first, p->chunk.pos,
                       p->stop,      p->sinks,        p->qs,        p->ks,          p->vs};
  for (size_t i = 0; i < sizeof shifted / sizeof *shifted; i++) discard(shifted[i]);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free((void *)all[i]);
}

/* ---- the contract in double ---- */

/* Logit of row t of query head h at slot i; raises *error to the error that fp32 may have. */
static inline double logit_of(const problem *p, int64_t b, int64_t h, int64_t t, int64_t i, double *error) {
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
static inline double softmax(double *s, int64_t n, double sink) {
  double m = sink, l = 0;
  for (int64_t i = 0; i < n; i++) m = s[i] > m ? s[i] : m;
  const double at = m == -INFINITY ? 0 : m;
  for (int64_t i = 0; i < n; i++) l += s[i] = exp(s[i] - at);
  l += exp(sink - at);
  for (int64_t i = 0; i < n; i++) s[i] = l == 0 ? 0 : s[i] / l;
  return at + log(l);
}

/* ---- every instruction set ---- */

static void report(const char *op, int before) {
  printf("%-7s %-10s %s  largest error %.2f of what is allowed\n", op, kv_cpu_isa(),
         failures == before ? "ok  " : "FAIL", worst);
  fflush(stdout);
  worst = 0;
}

/* Runs every instruction set, or only $KVEVICT_TEST_ISA, each in its own process since the choice is made once. */
static int run_isas(int (*test)(void)) {
  char names[64], *rest = names;
  int failed = 0;
  for (const char *isa = strcpy(names, kv_cpu_isas()); (isa = strtok_r(rest, " ", &rest));) {
    if (getenv("KVEVICT_TEST_ISA") && strcmp(getenv("KVEVICT_TEST_ISA"), isa) != 0) continue;
    const pid_t child = fork();
    if (child == 0) {
      setenv("KVEVICT_CPU_ISA", isa, 1);
      if (strcmp(kv_cpu_isa(), isa) == 0) exit(test());
      printf("%s: not on this processor\n", isa);
      exit(getenv("KVEVICT_TEST_ISA") != NULL);
    }
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) failed = 1;
  }
  return failed;
}
#endif
