/* Tiles of queries against blocks of keys, shared by attend and the ops of observing rows: packing, S = Q K^T and O +=
 * P V, with S logits and P attention weights. Sums are fp32, logits are in log2 units. The factors of products are fp32
 * or, where the instruction set multiplies bf16, bf16: P is then rounded to bf16, as flash attention does.
 *
 * A row's result does not depend on the tile or task that holds it, nor on the number of threads: every sum runs over
 * the columns in the same order, and columns that a row does not see add exact zeros. */
#ifndef KVEVICT_TILE_H
#define KVEVICT_TILE_H
#include <stdlib.h>

#include "amx.h"
#include "columns.h"
#include "parallel.h"
#include "simd.h"

enum {
  TILE = 48,                /* rows of an S tile, a multiple of MR and of SQUARE */
  PAD = KV_AMX ? TILE : MR, /* an operand is padded with rows of zeros to a multiple of PAD */
  KEYS = 256,               /* the most columns of an S tile, a multiple of PANEL */
  PANEL = NV * VL,          /* columns of a packed key panel */
};
#define KV_LOG2E 1.4426950408889634f
#define KV_LN2 0.6931471805599453f

static inline int64_t kv_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t kv_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t kv_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Returns the number of keys of a block: packed K and V take at most 256 KiB of the second-level cache. */
static inline int64_t kv_block(int64_t D) { return D > 128 ? KEYS / 2 : KEYS; }

/* Causal bounds: step t sees columns 0 .. clamp(shift + t + 1, least, n) - 1 of n columns. */
typedef struct {
  int64_t shift, least, n;
} kv_bounds;

static inline int64_t kv_seen(kv_bounds x, int64_t t) { return kv_min(kv_max(x.shift + t + 1, x.least), x.n); }

/* The query rows of one (b, kv head): those of its G query heads at every step. In log2 units a logit is scale * q.k,
 * or cap * tanh(scale * q.k) if cap > 0. A row has `words` words of 4 bytes: its numbers converted to fp32 or, where
 * the processor multiplies bf16, pairs of bf16 as they are. */
typedef struct {
  kv_dtype dtype;
  int pairs, amx;                   /* whether words are pairs of bf16; whether tile registers multiply these */
  int64_t D, G, words;              /* words: number of words of a row */
  const char *q;                    /* the query of the group's head 0 at step 0 */
  int64_t head_stride, step_stride; /* in bytes */
  float scale, cap;
} kv_queries;

static inline kv_queries kv_queries_of(kv_dtype dtype, int64_t D, int64_t G, const void *q, const int64_t stride[3],
                                       int64_t b, int64_t h, float scale, float softcap) {
  const int64_t size = kv_size(dtype);
  const int pairs = KV_PAIRS && dtype == KV_BF16;
  const int amx = KV_AMX && pairs && D % (2 * SQUARE) == 0;
  kv_queries x = {
      dtype, pairs, amx, D, G, pairs ? D / 2 : D, NULL, stride[1] * size, stride[2] * size, scale * KV_LOG2E, 0};
  if (q) x.q = (const char *)q + (b * stride[0] + h * G * stride[1]) * size;
  if (softcap > 0) x.scale = scale / softcap, x.cap = softcap * KV_LOG2E;
  return x;
}

/* Loads the query of head g at step t as floats q [D], times scale. */
static inline void kv_load_query(const kv_queries *x, int64_t g, int64_t t, float *q) {
  kv_load_row(x->dtype, x->q + g * x->head_stride + t * x->step_stride, q, x->D);
  for (int64_t d = 0; d < x->D; d++) q[d] *= x->scale;
}

/* Loads the query of head g at step t as q [words]: floats times scale, or pairs of bf16 as they are, whose products
 * are scaled later. */
static inline void kv_load_words(const kv_queries *x, int64_t g, int64_t t, float *q) {
  if (x->pairs)
    memcpy(q, x->q + g * x->head_stride + t * x->step_stride, (size_t)x->words * sizeof *q);
  else
    kv_load_query(x, g, t, q);
}

/* kv_tiles_begin is called before, and kv_tiles_end after, calls of kv_tile_s, kv_tile_o and kv_row_o. amx: whether
 * these multiply in tile registers (kv_queries). */
static inline kv_amx kv_tiles_begin(int amx) {
  kv_amx none;
  memset(&none, 0, sizeof none);
  return amx ? kv_amx_begin() : none;
}
static inline void kv_tiles_end(int amx, kv_amx before) {
  if (amx) kv_amx_end(before);
}

/* Computes C [MR, nv * VL] = scale (alpha C + A B), with A [MR, n], B [n, nv * VL] and a factor alpha [MR] per row;
 * alpha NULL: scale A B. If `pairs`, each word of A and B is a pair of bf16; otherwise it is a float, and scale is not
 * applied. nv and pairs are constants at every call, so that the sums stay in registers. */
KV_INLINE void kv_multiply_nv(int nv, int pairs, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t n,
                              const float *alpha, float scale, float *c, int64_t ldc) {
  vf acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) acc[r][j] = alpha ? alpha[r] * vf_load(c + r * ldc + j * VL) : vf_set1(0);
  for (int64_t i = 0; i < n; i++, b += ldb) {
    vf x[NV];
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) x[j] = vf_load(b + j * VL);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      const float y = a[r * lda + i];
#pragma GCC unroll 8
      for (int j = 0; j < nv; j++)
        if (pairs)
          acc[r][j] = vf_dot_pairs(acc[r][j], y, x[j]);
        else
          acc[r][j] += y * x[j];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) vf_store(c + r * ldc + j * VL, pairs ? scale * acc[r][j] : acc[r][j]);
}

static inline void kv_multiply(int64_t nv, int pairs, const float *a, int64_t lda, const float *b, int64_t ldb,
                               int64_t n, const float *alpha, float scale, float *c, int64_t ldc) {
#define KV_CASE(count)                                                                          \
  if (nv == count && !pairs) kv_multiply_nv(count, 0, a, lda, b, ldb, n, alpha, scale, c, ldc); \
  if (nv == count && KV_PAIRS && pairs) kv_multiply_nv(count, 1, a, lda, b, ldb, n, alpha, scale, c, ldc);
  KV_CASE(1)
  KV_CASE(2)
#if KV_NV == 4
  KV_CASE(3)
  KV_CASE(4)
#endif
#undef KV_CASE
}

/* Packs columns c0 .. c0 + n - 1 of one head's keys or values into k [ceil(n / PANEL)][words][PANEL], the last vector
 * padded with zeros. VL columns at a time are transposed in 4 x 4 blocks of words. row: [VL, D] scratch. */
static inline void kv_pack_k(const kv_columns *x, int pairs, int64_t c0, int64_t n, float *k, float *row) {
  static const float zeros[KV_MOST_D];
  const int64_t words = pairs ? x->D / 2 : x->D;
  for (int64_t c = 0; c < n; c += VL) {
    float *const panel = k + c / PANEL * PANEL * words + c % PANEL;
    const char *from[VL]; /* char, since a pair of bf16 may start where no float may */
    for (int i = 0; i < VL; i++)
      from[i] = c + i >= n ? (const char *)zeros
                : pairs    ? (const char *)kv_column_pairs(x, c0 + c + i, row + i * x->D)
                           : (const char *)kv_column_floats(x, c0 + c + i, row + i * x->D);
    for (int64_t d = 0; d < words; d += 4)
#pragma GCC unroll 4
      for (int i = 0; i < VL; i += 4) {
        const v4 r0 = *(const v4_any *)(from[i] + 4 * d), r1 = *(const v4_any *)(from[i + 1] + 4 * d);
        const v4 r2 = *(const v4_any *)(from[i + 2] + 4 * d), r3 = *(const v4_any *)(from[i + 3] + 4 * d);
        const v4 a = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), b = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
        const v4 e = __builtin_shufflevector(r0, r1, 2, 6, 3, 7), f = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
        float *const to = panel + d * PANEL + i;
        *(v4_any *)to = __builtin_shufflevector(a, b, 0, 1, 4, 5);
        *(v4_any *)(to + PANEL) = __builtin_shufflevector(a, b, 2, 3, 6, 7);
        *(v4_any *)(to + 2 * PANEL) = __builtin_shufflevector(e, f, 0, 1, 4, 5);
        *(v4_any *)(to + 3 * PANEL) = __builtin_shufflevector(e, f, 2, 3, 6, 7);
      }
  }
}

/* Returns values c0 .. c0 + n - 1 in place, as rows [n, width] that are *step floats apart; NULL if they must be
 * packed. */
static inline const float *kv_values_in_place(const kv_columns *x, int64_t c0, int64_t n, int64_t width,
                                              int64_t *step) {
  const kv_run run = kv_columns_run(x, c0, n);
  if (x->dtype != KV_F32 || x->D != width || run.n < n || c0 < x->packed) return NULL;
  *step = run.stride / (int64_t)sizeof(float);
  return (const float *)(const void *)run.x;
}

/* Packs columns c0 .. c0 + n - 1 into v: floats [n, width] or, if `pairs`, words [ceil(n / 2), width] that each pair a
 * column's number with the next column's. Rows are padded with zeros to width; with tile registers, rows of zeros
 * follow up to a multiple of SQUARE rows. Returns whether all numbers are finite. */
static inline int kv_pack_v(const kv_columns *x, int pairs, int64_t c0, int64_t n, float *v, int64_t width) {
  static const uint16_t zeros[KV_MOST_D];
  uint16_t rows[2][KV_MOST_D];
  const uint32_t high = 0x7f800000u, low = high >> 16; /* bits of an exponent, all 1 in inf and NaN */
  uint32_t other = 0;
  for (int64_t c = 0; c < n; c += 1 + pairs, v += width) {
    if (pairs) {
      const uint16_t *const first = kv_column_pairs(x, c0 + c, rows[0]);
      const uint16_t *const second = c + 1 < n ? kv_column_pairs(x, c0 + c + 1, rows[1]) : zeros;
      for (int64_t d = 0; d < x->D; d++) {
        const uint32_t word = first[d] | (uint32_t)second[d] << 16;
        v[d] = kv_float(word);
        other |= (word & high) == high || (word & low) == low;
      }
    } else {
      kv_column_load(x, c0 + c, v);
      for (int64_t d = 0; d < x->D; d++) other |= (kv_bits(v[d]) & high) == high;
    }
    for (int64_t d = x->D; d < width; d++) v[d] = 0;
  }
  if (KV_AMX && pairs) memset(v, 0, (size_t)(kv_round_up(n, 2 * SQUARE) / 2 - (n + 1) / 2) * (size_t)width * sizeof *v);
  return !other;
}

/* Multiplies row r of C [rows, columns] by scale and, unless `by` is NULL, by by[r]. columns is a multiple of VL. */
static inline void kv_scale_rows(int64_t rows, int64_t columns, const float *by, float scale, float *c, int64_t ldc) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < columns; j += VL)
      vf_store(c + r * ldc + j, (by ? by[r] * scale : scale) * vf_load(c + r * ldc + j));
}

/* Computes the logits s [rows, KEYS] of queries q [rows, words] and the first n keys of the packed block k. q and s
 * must have room for rows up to a multiple of PAD. */
static inline void kv_tile_s(const kv_queries *query, const float *q, int64_t rows, const float *k, int64_t n,
                             float *s) {
  const int64_t words = query->words;
  if (query->amx) {
    const int64_t columns = kv_round_up(n, 2 * SQUARE);
    for (int64_t c = 0; c < n; c += PANEL)
      kv_amx_multiply(0, rows, kv_min(PANEL, columns - c), q, words, k + c * words, PANEL, words, s + c, KEYS);
    kv_scale_rows(rows, columns, NULL, query->scale, s, KEYS);
    return;
  }
  for (int64_t c = 0; c < n; c += PANEL) {
    const int64_t nv = kv_min(NV, (n - c + VL - 1) / VL);
    for (int64_t r = 0; r < rows; r += MR)
      kv_multiply(nv, query->pairs, q + r * words, words, k + c * words, PANEL, words, NULL, query->scale,
                  s + r * KEYS + c, KEYS);
  }
}

/* Computes o [rows, width] = alpha o + p [rows, KEYS] v [n, width], with alpha [rows] and rows of v `step` floats
 * apart. p and o must have room for rows up to a multiple of PAD. If `amx`, p and v have words up to a multiple of
 * SQUARE, and the words of p after those of the n columns are 0. */
static inline void kv_tile_o(int pairs, int amx, const float *p, int64_t rows, int64_t n, const float *v, int64_t step,
                             int64_t width, const float *alpha, float *o) {
  const int64_t words = pairs ? (n + 1) / 2 : n;
  if (amx) {
    kv_scale_rows(rows, width, alpha, 1, o, width);
    kv_amx_multiply(1, rows, width, p, KEYS, v, step, kv_round_up(words, SQUARE), o, width);
    return;
  }
  for (int64_t d = 0; d < width; d += PANEL) {
    const int64_t nv = kv_min(NV, (width - d) / VL);
    for (int64_t r = 0; r < rows; r += MR)
      kv_multiply(nv, pairs, p + r * KEYS, KEYS, v + d, step, words, alpha + r, 1, o + r * width + d, width);
  }
}

/* Computes what kv_row_o below computes, in tile registers, with kv_tile_o's order of sums. p is the first row of a
 * tile, whose other rows are ignored. */
static inline void kv_row_o_amx(const float *p, int64_t n, const float *v, int64_t width, float alpha, float *o) {
  const int64_t whole = n / (2 * SQUARE) * SQUARE, words = n / 2;
  const vu first = (vu)vf_set1(kv_float(0xffffu)); /* mask of the first bf16 of a pair */
  float sums[SQUARE][2 * SQUARE], seen[SQUARE][2 * SQUARE];
  for (int64_t d = 0; d < width; d += 2 * SQUARE) {
    memset(sums, 0, sizeof sums), memset(seen, 0, sizeof seen);
    for (int64_t j = 0; j < 2 * SQUARE; j += VL) {
      vf_store(sums[0] + j, alpha * vf_load(o + d + j));
      for (int64_t c = whole; c < words; c++) vf_store(seen[c - whole] + j, vf_load(v + c * width + d + j));
      if (n % 2) vf_store(seen[words - whole] + j, (vf)((vu)vf_load(v + words * width + d + j) & first));
    }
    kv_amx_multiply(1, 1, 2 * SQUARE, p, KEYS, v + d, width, whole, sums[0], 2 * SQUARE);
    if (n % (2 * SQUARE))
      kv_amx_multiply(1, 1, 2 * SQUARE, p + whole, KEYS, seen[0], 2 * SQUARE, SQUARE, sums[0], 2 * SQUARE);
    memcpy(o + d, sums[0], sizeof sums[0]);
  }
}

/* Computes o as kv_tile_o does, but for one row and only the n columns that it sees. Needed where v has an inf or a
 * NaN, since the weight 0 of an unseen column times such a number is not 0. */
static inline void kv_row_o(int pairs, int amx, const float *p, int64_t n, const float *v, int64_t width, float alpha,
                            float *o) {
  if (amx) {
    kv_row_o_amx(p, n, v, width, alpha, o);
    return;
  }
  const int64_t words = pairs ? n / 2 : n;
  const vu first = (vu)vf_set1(kv_float(0xffffu)); /* mask of the first bf16 of a pair */
  for (int64_t d = 0; d < width; d += VL) {
    vf acc = alpha * vf_load(o + d);
    for (int64_t c = 0; c < words; c++) {
      const vf x = vf_load(v + c * width + d);
      acc = pairs ? vf_dot_pairs(acc, p[c], x) : acc + p[c] * x;
    }
    if (pairs && n % 2) {
      const vu x = (vu)vf_load(v + words * width + d) & first;
      acc = vf_dot_pairs(acc, p[words], (vf)x);
    }
    vf_store(o + d, acc);
  }
}

/* Caps a row's first n logits of s [width], to cap * tanh(s), if cap > 0. Sets s to -inf from column n on, which the
 * row does not see. */
static inline void kv_cap_and_mask(float *s, float cap, int64_t n, int64_t width) {
  if (cap > 0)
    for (int64_t c = 0; c < n; c += VL) vf_store(s + c, cap * vf_tanh(vf_load(s + c)));
  for (int64_t c = n; c < width; c++) s[c] = -INFINITY;
}

/* Returns the gradient to a logit before kv_cap_and_mask capped it, given w, the gradient to the capped logit x. */
KV_INLINE vf kv_cap_grad(vf w, vf x, float cap) { return cap > 0 ? w * (1 - (x / cap) * (x / cap)) : w; }

/* Allocates one block of memory for n arrays, of which *fields[i] becomes array i, of sizes[i] floats. Returns the
 * block, which the caller frees; NULL if there is no memory. */
static inline void *kv_carve(int n, const int64_t *sizes, float **const *fields) {
  int64_t total = 0;
  for (int i = 0; i < n; i++) total += kv_round_up(sizes[i], 16);
  float *memory = aligned_alloc(64, (size_t)total * sizeof *memory);
  for (int64_t i = 0, at = 0; memory && i < n; at += kv_round_up(sizes[i], 16), i++) *fields[i] = memory + at;
  return memory;
}
#endif
