/* attend, decode and linear on every instruction set of this processor against loops in double, written from the comments of
 * kvevict.h, and called by several threads at once. Outputs start as NaN; each result is computed again with threads
 * and must have the same bits. See run.sh. */
#include <stdatomic.h>

#include "problem.h"

/* Half a unit in the last place of the output. */
static double rounding(kv_dtype dtype) { return dtype == KV_F32 ? 2e-6 : dtype == KV_F16 ? 6e-4 : 4.5e-3; }

/* Checks one row of attention over its first n slots. */
static void check_row(const problem *p, int64_t b, int64_t h, int64_t t, int64_t n, const void *out, int64_t out_at,
                      float lse, double weight_rounding, double *s, double *error) {
  *error = 1e-6;
  for (int64_t i = 0; i < n; i++) s[i] = logit_of(p, b, h, t, i, error);
  const double want = softmax(s, n, p->sinks ? p->sinks[h] : -INFINITY);
  check_close(lse, want, *error + 3e-7 * fabs(want), "lse", (b * p->H + h) * p->T + t);
  for (int64_t d = 0; d < p->D; d++) {
    const double *v = p->vs + (b * p->Hkv + h / p->G) * p->most * p->D + d;
    double o = 0, size = 0;
    for (int64_t i = 0; i < n; i++) o += s[i] * v[i * p->D], size += s[i] * fabs(v[i * p->D]);
    const double tolerance = 1e-7 + rounding(p->dtype) * fabs(o) + (2 * *error + 1e-6 + weight_rounding) * size;
    const double got = get(p->dtype, out, out_at + d);
    const int either = want == -INFINITY && isnan(o); /* 0 * inf: 0 or NaN */
    if (!either || (got != 0 && !isnan(got))) check_close(got, o, tolerance, "out", out_at + d);
  }
}

/* ---- the ops ---- */

static void test_attend(kv_dtype dtype, int64_t T, int64_t S, int64_t longest) {
  problem p = make(dtype, T, S, longest, 1);
  const int32_t *const stop = below(2) ? NULL : p.stop;
  const int64_t outs = p.B * T * p.H * p.D;
  void *out[2] = {numbers(dtype, outs), numbers(dtype, outs)};
  float *lse[2] = {nans(p.B * p.H * T), nans(p.B * p.H * T)};
  for (int i = 0; i < 2; i++) {
    kv_attend a = {dtype, p.B, p.H,     p.Hkv,   T,    S,       p.D,    p.scale, p.softcap,
                   p.q,   {0}, p.slots, p.chunk, stop, p.sinks, out[i], lse[i],  p.rows};
    memcpy(a.q_stride, p.q_stride, sizeof a.q_stride);
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_attend_cpu(&a) == KV_OK, "attend status");
  }
  check(memcmp(out[0], out[1], (size_t)(outs * kv_size(dtype))) == 0 || p.wild, "attend out, serial and parallel");
  check_same(lse[0], lse[1], p.B * p.H * T, "attend lse, serial and parallel");
  const int rounded = dtype == KV_BF16 && strstr(kv_cpu_isa(), "bf16") != NULL;
  const double weights = rounded ? rounding(dtype) : 0;
  double *s = need((size_t)(longest + S), sizeof *s), error;
  for (int64_t i = 0; i < p.B * p.H * T; i++) {
    const int64_t b = i / T / p.H, h = i / T % p.H, t = i % T, first = p.chunk.first[b];
    int64_t seen = t + S - T + 1 - first;
    seen = stop ? stop[b] - first : seen < 0 ? 0 : seen > S - first ? S - first : seen;
    seen += p.slots.len[b * p.Hkv + h / p.G];
    check_row(&p, b, h, t, seen, out[0], ((b * T + t) * p.H + h) * p.D, lse[0][i], weights, s, &error);
  }
  for (int i = 0; i < 2; i++) discard(out[i]), free(lse[i]);
  free(s);
  drop(&p);
}

/* Gives some heads i of later batch rows the first len[i] slots of head from[i], which is the same kv head of the first
 * batch row; from[i] of all other heads is i. Draws len[i] <= slots.len[i]. */
static void share_slots(problem *p, int64_t *from, int32_t *len) {
  for (int64_t i = 0; i < p->B * p->Hkv; i++) {
    const int32_t n = p->slots.len[i];
    len[i] = (int32_t)(below(3) ? below(n + 1) : n * below(2)), from[i] = i;
    if (i < p->Hkv || len[i % p->Hkv] > n || below(3) == 0) continue;
    from[i] = i % p->Hkv, len[i] = len[from[i]];
    if (below(2)) len[i] -= (int32_t)below(len[i] + 1);
    for (int64_t j = 0; j < len[i] * p->D; j++) {
      const int64_t to = p->slots.offset[i] * p->D + j, at = p->slots.offset[from[i]] * p->D + j;
      put(p->dtype, p->slots.k, to, get(p->dtype, p->slots.k, at));
      put(p->dtype, p->slots.v, to, get(p->dtype, p->slots.v, at));
    }
  }
  free(p->qs), free(p->ks), free(p->vs);
  gather(p);
}

static void test_decode(kv_dtype dtype, int64_t longest) {
  problem p = make(dtype, 1, 1, longest, 0);
  const int64_t C = longest + 1 + below(9), outs = p.B * p.H * p.D, bytes = p.rows * p.D * kv_size(dtype);
  enum { RUNS = 4 }; /* with threads, without, with some of the slots in a prefix, and with one that rows share */
  void *out[RUNS];
  float *lse[RUNS], *probs[RUNS];
  for (int i = 0; i < RUNS; i++)
    out[i] = numbers(dtype, outs), lse[i] = nans(p.B * p.H), probs[i] = nans(p.B * p.Hkv * C);
  void *k = need((size_t)bytes, 1), *v = need((size_t)bytes, 1);
  int64_t *own_offset = need((size_t)(p.B * p.Hkv), sizeof *own_offset);
  int32_t *own_len = need((size_t)(p.B * p.Hkv), sizeof *own_len), *len = need((size_t)(p.B * p.Hkv), sizeof *len);
  int64_t *from = need((size_t)(p.B * p.Hkv), sizeof *from), *offset = need((size_t)(p.B * p.Hkv), sizeof *offset);
  const int with_probs = below(2) == 0;
  share_slots(&p, from, len);
  memcpy(k, p.slots.k, (size_t)bytes), memcpy(v, p.slots.v, (size_t)bytes);
  for (int64_t i = 0; i < p.B * p.Hkv; i++) /* the buffers' expected content */
    for (int64_t d = 0; d < p.D; d++) {
      const int64_t to = (p.slots.offset[i] + p.slots.len[i]) * p.D + d, b = i / p.Hkv, h = i % p.Hkv,
                    n = p.slots.len[i];
      put(dtype, k, to, at_slot(&p, NULL, p.chunk.k, p.chunk.k_stride, b, h, n, d));
      put(dtype, v, to, at_slot(&p, NULL, p.chunk.v, p.chunk.v_stride, b, h, n, d));
    }
  for (int64_t i = 0; i < p.B * p.Hkv; i++) {
    own_offset[i] = p.slots.offset[i] + len[i], own_len[i] = p.slots.len[i] - len[i];
    offset[i] = p.slots.offset[from[i]];
  }
  for (int i = 0; i < RUNS; i++) {
    kv_decode a = {.dtype = dtype,
                   .B = p.B,
                   .H = p.H,
                   .Hkv = p.Hkv,
                   .D = p.D,
                   .C = C,
                   .scale = p.scale,
                   .softcap = p.softcap,
                   .q = p.q,
                   .chunk = p.chunk,
                   .slots = p.slots,
                   .sinks = p.sinks,
                   .out = out[i],
                   .lse = lse[i],
                   .probs = with_probs ? probs[i] : NULL,
                   .rows = p.rows,
                   .rows_prefix = p.rows};
    memcpy(a.q_stride, p.q_stride, sizeof a.q_stride);
    if (i >= 2) {
      a.prefix = (kv_slots){.k = k, .v = v, .offset = i == 2 ? p.slots.offset : offset, .len = len};
      a.slots.offset = own_offset, a.slots.len = own_len;
    }
    kv_set_parallel(i == 1 ? NULL : threads_hook, 3); /* threads first: the serial run finds the new row written */
    check(kv_decode_cpu(&a) == KV_OK, "decode status");
  }
  for (int i = 1; i < RUNS; i++) {
    const char *what = i == 1   ? "decode, serial and parallel"
                       : i == 2 ? "decode, with a prefix and without"
                                : "decode, with a shared prefix and without";
    check(memcmp(out[0], out[i], (size_t)(outs * kv_size(dtype))) == 0 || p.wild, what);
    check_same(lse[0], lse[i], p.B * p.H, what);
    check_same(probs[0], probs[i], p.B * p.Hkv * C, what);
  }
  check(p.wild || !memcmp(k, p.slots.k, (size_t)bytes), "decode writes the key");
  check(p.wild || !memcmp(v, p.slots.v, (size_t)bytes), "decode writes the value");
  double *s = need((size_t)longest + 1, sizeof *s), *mean = need((size_t)C, sizeof *s), error, most;
  for (int64_t i = 0; i < p.B * p.Hkv; i++) {
    const int64_t b = i / p.Hkv, n = p.slots.len[i] + 1;
    check(p.slots.pos[p.slots.offset[i] + n - 1] == p.chunk.pos[b], "decode writes pos");
    most = 0;
    for (int64_t c = 0; c < C; c++) mean[c] = 0;
    for (int64_t g = 0; g < p.G; g++) {
      const int64_t row = b * p.H + i % p.Hkv * p.G + g;
      check_row(&p, b, row % p.H, 0, n, out[0], row * p.D, lse[0][row], 0, s, &error);
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
  for (int i = 0; i < RUNS; i++) discard(out[i]), free(lse[i]), free(probs[i]);
  free(s), free(mean), free(k), free(v), free(own_offset), free(own_len), free(len), free(from), free(offset);
  drop(&p);
}

/* ---- threads ---- */

enum { CALLERS = 3 };

static atomic_int callers_left;

/* Sets a hook, other numbers of threads and no hook at all, until all callers are done. */
static void *change_threads(void *unused) {
  for (unsigned i = 0; atomic_load(&callers_left) > 0; i++)
    kv_set_parallel(i % 3 ? threads_hook : NULL, (int)(1 + i % 4));
  return unused;
}

typedef struct {
  problem p;
  float *want;
  int same;
} caller;

/* lse [B, H, T] of attend; its work is cut by the number of threads too. */
static float *attended(const caller *x) {
  const problem *p = &x->p;
  const int64_t rows = p->B * p->H * p->T;
  void *out = need((size_t)(rows * p->D), (size_t)kv_size(p->dtype));
  float *lse = nans(rows);
  kv_attend a = {p->dtype, p->B, p->H,     p->Hkv,   p->T,    p->S,     p->D, p->scale, p->softcap,
                 p->q,     {0},  p->slots, p->chunk, p->stop, p->sinks, out,  lse,      p->rows};
  memcpy(a.q_stride, p->q_stride, sizeof a.q_stride);
  if (kv_attend_cpu(&a) != KV_OK) abort();
  free(out);
  return lse;
}

static void *call(void *of) {
  caller *x = of;
  for (int i = rounds(40); i > 0; i--) {
    float *got = attended(x);
    x->same &= same(got, x->want, x->p.B * x->p.H * x->p.T);
    free(got);
  }
  atomic_fetch_sub(&callers_left, 1);
  return NULL;
}

/* attend called by several threads at once while another thread changes how loops run: every result has the bits of a
 * call alone. `run.sh tsan` also reports memory that one thread writes while another reads it. */
static void test_threads(void) {
  pthread_t changer, threads[CALLERS];
  caller callers[CALLERS];
  atomic_store(&callers_left, CALLERS);
  for (int i = 0; i < CALLERS; i++) {
    callers[i] = (caller){.p = make((kv_dtype)i, 65, 65, 64, 1), .same = 1};
    callers[i].want = attended(&callers[i]);
  }
  if (pthread_create(&changer, NULL, change_threads, NULL)) abort();
  for (int i = 0; i < CALLERS; i++)
    if (pthread_create(&threads[i], NULL, call, &callers[i])) abort();
  for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
  pthread_join(changer, NULL);
  for (int i = 0; i < CALLERS; i++) {
    check(callers[i].same, "attend while the hook changes");
    free(callers[i].want);
    drop(&callers[i].p);
  }
}

/* ---- conversions, refusals ---- */

/* All 65,536 halves, and floats between them: they round to the nearest half, and a tie to the even one. */
static void test_half(kv_dtype dtype) {
  const int inf = dtype == KV_F16 ? 0x7c00 : 0x7f80;
  for (int u = 0; u < 65536; u++) {
    const uint16_t h[2] = {(uint16_t)u}; /* the size of a float, which kv_load_row could read */
    float x = 0;
    uint16_t back[2] = {0};
    kv_load_row(dtype, h, &x, 1);
    kv_store_row(dtype, &x, back, 1);
    const double want = decode_half(dtype, h[0]);
    check(isnan(want) ? isnan(x) && isnan(decode_half(dtype, back[0])) : x == want && back[0] == h[0],
          "half there and back");
    if ((u & 0x7fff) >= inf) continue;
    /* the next one away from 0; after the largest, the power of two that would follow */
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

static void test_linear(kv_dtype dtype) {
  const int64_t B = below(5), T = below(9), N = below(200), K = 32 * below(9), gap = below(3), rows = B * T;
  void *x = numbers(dtype, rows * (K + gap)), *weight = numbers(dtype, N * K), *bias = numbers(dtype, N);
  void *out[2] = {numbers(dtype, rows * N), numbers(dtype, rows * N)};
  for (int64_t i = 0; i < rows * K; i++) put(dtype, x, i / (K ? K : 1) * (K + gap) + i % (K ? K : 1), normal());
  for (int64_t i = 0; i < N * K; i++) put(dtype, weight, i, normal());
  for (int64_t i = 0; i < N; i++) put(dtype, bias, i, normal());
  kv_linear a = {dtype, B, T, N, K, x, {T * (K + gap), K + gap}, weight, below(2) ? bias : NULL, NULL};
  for (int i = 0; i < 2; i++) {
    a.out = out[i];
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_linear_cpu(&a) == KV_OK, "linear status");
  }
  for (int64_t i = 0; i < rows * N; i++) {
    double want = a.bias ? get(dtype, bias, i % N) : 0, size = fabs(want);
    for (int64_t k = 0; k < K; k++) {
      const double term = get(dtype, x, i / N * (K + gap) + k) * get(dtype, weight, i % N * K + k);
      want += term, size += fabs(term);
    }
    const double rounded = dtype == KV_F32 ? 0 : dtype == KV_F16 ? 0x1p-11 : 0x1p-8;
    check_close(get(dtype, out[0], i), want, (double)(K + 1) * 0x1p-24 * size + rounded * fabs(want) + 1e-7, "linear",
                i);
    check(get(dtype, out[0], i) == get(dtype, out[1], i), "linear, serial and parallel");
  }
  discard(x), discard(weight), discard(bias), discard(out[0]), discard(out[1]);
}

static void test_refusals(void) {
  kv_attend a = {.B = 1, .H = 4, .Hkv = 2, .D = 64};
  a.Hkv = 3, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "H not a multiple of Hkv");
  a.Hkv = 2, a.D = 60, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "D not a multiple of 8");
  a.D = 520, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "D over 512");
  a.D = 64, a.T = -1, check(kv_attend_cpu(&a) == KV_BAD_SHAPE, "T negative");
  kv_linear y = {.B = 1, .T = 1, .N = 1, .K = 40};
  check(kv_linear_cpu(&y) == KV_BAD_SHAPE, "K not a multiple of 32");
  a.T = 1, a.dtype = (kv_dtype)3, check(kv_attend_cpu(&a) == KV_BAD_DTYPE, "dtype");
  kv_attend none = {.B = 0, .H = 4, .Hkv = 2, .D = 64};
  check(kv_attend_cpu(&none) == KV_OK, "empty batch");
}

static int test_isa(void) {
  static const int64_t lengths[] = {0, 1, 2, 5, 17, 33, 50, 97, 130}, slots[] = {0, 1, 3, 40, 64, 255, 300, 600};
  const int n = rounds(90);
  int before = failures;
  for (int i = 0; i < n; i++) {
    const int64_t T = one_of(9, lengths), S = below(2) ? T : one_of(9, lengths);
    test_attend((kv_dtype)(i % 3), T, S, one_of(8, slots));
  }
  test_attend(KV_F32, 300, 300, 300);
  for (int i = 0; i < (n + 5) / 6; i++) { /* few rows on many slots, cut into splits */
    const int64_t T = 1 + below(64);
    test_attend((kv_dtype)(i % 3), T, below(2) ? T : below(80), 2600);
  }
  report("attend", before), before = failures;
  for (int i = 0; i < n; i++) test_decode((kv_dtype)(i % 3), i % 5 ? one_of(8, slots) : 1500);
  report("decode", before), before = failures;
  for (int i = 0; i < n; i++) test_linear((kv_dtype)(i % 3));
  report("linear", before), before = failures;
  test_threads();
  report("threads", before), before = failures;
  test_half(KV_F16), test_half(KV_BF16), test_refusals();
  report("others", before);
  return failures > 0;
}

int main(void) { return run_isas(test_isa); }
