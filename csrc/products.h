/* The products of stream.h: of up to SHARE query rows with keys, and of their weights with values. Each number is
 * loaded once for all of these rows. The storage format of the slots decides the form of a product (kv_form in
 * words.h). Every product is compiled once for each form and number of rows, so that its sums stay in registers. */
#ifndef KVEVICT_PRODUCTS_H
#define KVEVICT_PRODUCTS_H
#include "tile.h"
#include "words.h"

enum {
  BLOCK = 64, /* slots of a block, which fits the first-level cache */
  SHARE = 4,  /* the most query rows that share a load */
#if defined(__AVX512F__) || defined(__aarch64__)
  TOGETHER = 4, /* how many of SHARE rows are computed at once: sums of 4 rows and 4 slots fit 32 registers */
#else
  TOGETHER = 2, /* sums of 2 rows and 4 slots fit 16 registers */
#endif
};

typedef struct {
  kv_dtype dtype;
  int in_place; /* whether rows as computed are read in place: D is a multiple of VL, no slot is packed */
  int64_t D, width, rows;
  kv_form k_form, v_form;         /* the forms in which stored keys and values are multiplied */
  int rotated;                    /* whether o is Hadamard-transformed, as 4-bit values are */
  float *q, *s, *buffer, *alpha;  /* [rows, width] scaled; [rows, KEYS]; [BLOCK, width]; [rows] */
  float *words, *by, *sum, *more; /* queries as words [rows, D / 2]; [rows] their scales, sums and q . centre */
} kv_stream;

/* n rows of `vectors` vectors each, the first row at x, `stride` bytes apart. */
typedef struct {
  kv_form form;
  int64_t n, vectors, stride;
  const char *x;
} kv_stream_rows;

/* The address of the memory that is read after the current rows. While these rows are multiplied, as many bytes as they
 * have are fetched from there into the second-level cache, so that memory is never idle. A prefetch never faults, so
 * the address may lie past the slots; it is an integer because no pointer may leave its array. 0: nothing is
 * fetched. */
typedef uintptr_t kv_stream_next;

/* Fetches `bytes` bytes from the address next + from on into the cache; `bytes` is a constant at every call. */
KV_INLINE void kv_stream_fetch(kv_stream_next next, int64_t from, int bytes) {
  const kv_stream_next at = next + (kv_stream_next)from;
  if (next && (bytes >= 64 || at % 64 < (kv_stream_next)bytes))
#pragma GCC unroll 32
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const void *)(at + (kv_stream_next)i), 0, 2);
}

KV_INLINE int kv_is_words(kv_form form) { return form >= KV_BY_BF16; }

/* Returns how many bytes of a row the numbers of one vector take. */
KV_INLINE int kv_vector_bytes(kv_form form) {
  return VL * (form == KV_FROM_F32 || form == KV_BY_BF16 ? 4 : form == KV_BY_INT4 ? 1 : 2);
}

/* Loads one vector of a row. half 0 or 1: the first or second of the two vectors that begin at x. half 2: the vector at
 * x that is left over where a row has an odd number of vectors. Of bf16 read as floats, half 0 has the numbers at even
 * places and half 1 those at odd places: a shift gives the one, a mask the other. q and o are kept in that order. */
KV_INLINE vf kv_stream_half(kv_form form, int half, const char *x) {
  if (form == KV_BY_INT4) return (vf)kv_nibbles(x, half);
  if (form == KV_FROM_BF16 && half < 2) {
    const vu words = vu_load(x);
    return (vf)(half ? words & 0xffff0000u : words << 16);
  }
  x += half % 2 * kv_vector_bytes(form);
  if (form == KV_FROM_BF16) return (vf)(vu_of_16bit(x) << 16);
  if (form == KV_FROM_F32) return vf_load((const float *)(const void *)x);
  if (form == KV_FROM_F16) return vf_of_f16(x);
  return form == KV_BY_INT8 ? (vf)kv_signed(x) : (vf)vu_load(x);
}

/* Adds to acc [G, slots] the products of q and k over vector j + half % 2 of the rows. Slots after slot `last` do not
 * exist; slot `last` is read in their place. */
KV_INLINE void kv_stream_products(kv_form form, int G, int slots, int64_t last, int half, int64_t j, const float *q,
                                  kv_stream_rows k, vf *acc) {
  vf y[SHARE];
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) {
    y[g] = vf_load(q + (g * k.vectors + j + half % 2) * VL);
    KV_KEEP(y[g]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < slots; i++) {
    const vf x = kv_stream_half(form, half, k.x + kv_min(i, last) * k.stride + j * kv_vector_bytes(form));
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      vf *to = acc + g * slots + i;
      *to = kv_is_words(form) ? vf_add_words(form, *to, (kv_v16)x, (kv_v16)y[g]) : *to + x * y[g];
    }
  }
}

/* Computes columns 0 .. last of s [G, KEYS] = q . k, with q [G, k.vectors * VL]. Columns last + 1 .. slots - 1 get
 * arbitrary numbers. form, G and slots are constants at every call. */
KV_INLINE void kv_stream_dots(kv_form form, int G, int slots, int64_t last, const float *q, kv_stream_rows k,
                              kv_stream_next next, float *s) {
  vf acc[16] = {{0}};
  float sums[16];
  int64_t j = 0;
  for (; j + 2 <= k.vectors; j += 2) {
    kv_stream_fetch(next, j * slots * kv_vector_bytes(form), 2 * slots * kv_vector_bytes(form));
    kv_stream_products(form, G, slots, last, 0, j, q, k, acc);
    kv_stream_products(form, G, slots, last, 1, j, q, k, acc);
  }
  if (j < k.vectors && form != KV_BY_INT4) kv_stream_products(form, G, slots, last, 2, j, q, k, acc);
#pragma GCC unroll 4
  for (int i = 0; i < G * slots; i += VL) vf_store(sums + i, vf_sums(form > KV_BY_BF16, acc + i));
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) memcpy(s + g * KEYS, sums + g * slots, (size_t)slots * sizeof *s);
}

/* Computes the first k.n columns of s [G, KEYS] = q . k, with q [G, k.vectors * VL]. */
KV_INLINE void kv_stream_logits_of(kv_form form, int G, const float *q, kv_stream_rows k, kv_stream_next next,
                                   float *s) {
  const int apart = G == SHARE ? TOGETHER : G,
            slots = apart == 1 ? 8 : 4; /* slots computed at once: with more, bf16 is read more slowly */
  for (int64_t c = 0; c < k.n; c += slots, k.x += slots * k.stride) {
#pragma GCC unroll 2
    for (int g = 0; g < G; g += apart)
      if (c + slots <= k.n)
        kv_stream_dots(form, apart, slots, slots - 1, q + g * k.vectors * VL, k, g ? 0 : next, s + g * KEYS + c);
      else
        kv_stream_dots(form, apart, slots, k.n - c - 1, q + g * k.vectors * VL, k, 0, s + g * KEYS + c);
    if (next) next += (kv_stream_next)(slots * k.vectors * kv_vector_bytes(form));
  }
}

/* Computes o [G, nv * VL] = alpha o + p [G, KEYS] v [n, nv * VL]. Rows of o are v.vectors * VL floats apart; alpha may
 * be NULL: 1. */
KV_INLINE void kv_stream_sum(kv_form form, int G, int nv, const float *p, kv_stream_rows v, kv_stream_next next,
                             const float *alpha, float *o) {
  vf acc[SHARE][8];
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) acc[g][j] = (alpha ? alpha[g] : 1) * vf_load(o + (g * v.vectors + j) * VL);
  for (int64_t c = 0; c < v.n; c++, v.x += v.stride) {
    kv_stream_fetch(next, c * nv * kv_vector_bytes(form), nv * kv_vector_bytes(form));
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) {
      const vf x = kv_stream_half(form, nv == 1 ? 2 : j % 2, v.x + j / 2 * 2 * kv_vector_bytes(form));
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g][j] += p[g * KEYS + c] * x;
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) vf_store(o + (g * v.vectors + j) * VL, acc[g][j]);
}

/* The attention weights of up to SHARE rows for a block of packed values, each times its value's scale, as words
 * [SHARE, BLOCK]. Row g's products are its words times by[g]; more[g] is to be added to every number of the row's
 * output. */
typedef struct {
  int16_t words[SHARE * BLOCK];
  float by[SHARE], more[SHARE];
} kv_stream_weights;

/* Computes what kv_stream_sum computes, with the weights as words. Rows of o are D floats apart. With 4-bit values,
 * vectors of the lower and of the upper half of D alternate in a row. */
KV_INLINE void kv_stream_sum_words(kv_form form, int G, int nv, const kv_stream_weights *w, kv_stream_rows v,
                                   kv_stream_next next, int64_t D, const float *alpha, float *o) {
  static const char zeros[4 * WORDS];
  const int64_t step = form == KV_BY_INT4 ? D / 2 : WORDS;
  vf acc[SHARE][8] = {{{0}}};
  for (int64_t c = 0; c < v.n; c += 2, v.x += 2 * v.stride) {
    const char *second = c + 1 < v.n ? v.x + v.stride : zeros;
    kv_stream_fetch(next, c * nv * kv_vector_bytes(form), 2 * nv * kv_vector_bytes(form));
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      const int half = nv == 1 ? 2 : j % 2;
      const int64_t at = j / 2 * 2 * kv_vector_bytes(form);
      const kv_v16 a = (kv_v16)kv_stream_half(form, half, v.x + at),
                   b = (kv_v16)kv_stream_half(form, half, second + at);
      const kv_v16 low = kv_low16(a, b), high = kv_high16(a, b);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const kv_v16 y = kv_pair16(w->words + g * BLOCK + c);
        acc[g][2 * j] = vf_add_words(form, acc[g][2 * j], low, y);
        acc[g][2 * j + 1] = vf_add_words(form, acc[g][2 * j + 1], high, y);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      const vf low = vf_of_vi((vi)acc[g][2 * j]), high = vf_of_vi((vi)acc[g][2 * j + 1]);
      const vf first = KV_FIRST(low, high), last = KV_SECOND(low, high);
      float *to = o + g * D + (form == KV_BY_INT4 ? j / 2 * WORDS + j % 2 * step : j * step);
      const float by = alpha ? alpha[g] : 1;
      vf_store(to, by * vf_load(to) + w->by[g] * first + w->more[g]);
      vf_store(to + VL, by * vf_load(to + VL) + w->by[g] * last + w->more[g]);
    }
}

/* Computes o [G, width] = alpha o + p [G, KEYS] v, with the weights as floats p or as words w. */
KV_INLINE void kv_stream_values_of(kv_form form, int G, const float *p, const kv_stream_weights *w, kv_stream_rows v,
                                   kv_stream_next next, int64_t D, const float *alpha, float *o) {
  const int most = kv_is_words(form) ? (TOGETHER == 4 && G < 3 ? 4 : 2) : G == 1 ? 8 : G == SHARE ? TOGETHER : 4;
  for (int64_t j = 0, nv; j < v.vectors; j += nv) {
    nv = v.vectors - j >= most ? most : kv_min(v.vectors - j, 2);
    kv_stream_rows some = v;
    some.x += j * kv_vector_bytes(form);
    float *to = o + j * (kv_is_words(form) ? (form == KV_BY_INT4 ? WORDS / 2 : WORDS) : VL);
#define KV_CASE(count)                                                \
  if (kv_is_words(form))                                              \
    kv_stream_sum_words(form, G, count, w, some, next, D, alpha, to); \
  else                                                                \
    kv_stream_sum(form, G, count, p, some, next, alpha, to)
    if (nv == most) {
      KV_CASE(most);
    } else if (nv == 2) {
      KV_CASE(2);
    } else if (form != KV_BY_INT4) {
      KV_CASE(1);
    }
#undef KV_CASE
    next += next ? (uintptr_t)(v.n * nv * kv_vector_bytes(form)) : 0;
  }
}

/* Returns how many of the `left` remaining rows share the next loads: 3 of 5 or 6, since 4 rows and then 1 would take
 * as long as 4 and 4. */
static inline int64_t kv_stream_share(int64_t left) { return left > SHARE && left < 7 ? 3 : kv_min(left, SHARE); }

#define KV_EACH_SHARE(X, form) X(form, 1) X(form, 2) X(form, 3) X(form, 4)
#define KV_EACH_FORM(X)          \
  KV_EACH_SHARE(X, KV_FROM_F32)  \
  KV_EACH_SHARE(X, KV_FROM_F16)  \
  KV_EACH_SHARE(X, KV_FROM_BF16) \
  KV_EACH_SHARE(X, KV_BY_BF16)   \
  KV_EACH_SHARE(X, KV_BY_INT8)   \
  KV_EACH_SHARE(X, KV_BY_INT4)
/* Whether this instruction set has products of this form. */
#define KV_HAS(form) (form < KV_BY_BF16 || (form == KV_BY_BF16 ? KV_BF16_WORDS : KV_WORDS))

/* Turns s [G, KEYS], the products of the words of rows r .. r + G - 1 with keys k of this form, into logits. */
KV_INLINE void kv_stream_scale(const kv_stream *x, kv_form form, int64_t r, int64_t G, kv_stream_rows k, float *s) {
  float scale[BLOCK], least[BLOCK];
  if (form != KV_BY_BF16) kv_words_ends(form, x->D, k.x, k.stride, k.n, scale, least);
  for (int64_t g = r; g < r + G; g++, s += KEYS)
#pragma GCC unroll 4
    for (int64_t c = 0; c < BLOCK; c += VL) {
      vf by = vf_set1(x->by[g]), more = vf_set1(x->more[g]);
      if (form != KV_BY_BF16) by *= vf_load(scale + c);
      if (form == KV_BY_INT4) more += x->sum[g] * vf_load(least + c);
      vf_store(s + c, vf_load(s + c) * by + more);
    }
}

/* Computes the logits s [G, KEYS] of rows r .. r + G - 1 against the keys of a piece. */
static void kv_stream_keys(const kv_stream *x, int64_t r, int64_t G, const kv_stream_rows *piece, kv_stream_next next,
                           float *s) {
  const kv_stream_rows k = *piece;
  const float *q = kv_is_words(k.form) ? x->words + r * x->D / 2 : x->q + r * x->width;
#define KV_CASE(as, count)                                         \
  case 4 * as + count:                                             \
    if (KV_HAS(as)) kv_stream_logits_of(as, count, q, k, next, s); \
    break;
  switch (4 * (int)k.form + (int)G) { KV_EACH_FORM(KV_CASE) }
#undef KV_CASE
  if (k.form == KV_BY_BF16) kv_stream_scale(x, KV_BY_BF16, r, G, k, s);
  if (k.form == KV_BY_INT8) kv_stream_scale(x, KV_BY_INT8, r, G, k, s);
  if (k.form == KV_BY_INT4) kv_stream_scale(x, KV_BY_INT4, r, G, k, s);
}

/* Turns attention weights p [G, KEYS] for v, a piece of packed values, into words w. */
KV_INLINE void kv_stream_weigh(kv_form form, kv_stream_rows v, int64_t D, int64_t G, const float *p,
                               kv_stream_weights *w) {
  float scale[BLOCK], least[BLOCK], weight[BLOCK];
  kv_words_ends(form, D, v.x, v.stride, v.n, scale, least);
  for (int64_t g = 0; g < G; g++, p += KEYS) {
    int16_t *words = w->words + g * BLOCK;
    vf sum = vf_set1(0), all = vf_set1(0);
#pragma GCC unroll 4
    for (int c = 0; c < BLOCK; c += VL) { /* columns after this piece have a scale of 0 */
      const vf y = vf_load(p + c) * vf_load(scale + c);
      vf_store(weight + c, y);
      all += y;
      if (form == KV_BY_INT4) sum += vf_load(p + c) * vf_load(least + c);
    }
    w->by[g] = kv_words_of(weight, BLOCK, words);
    if (form == KV_BY_INT4) { /* corrects the words' rounding error, times 7.5, the mean of the numbers 0..15 */
      int32_t rounded = 0;
      for (int c = 0; c < BLOCK; c++) rounded += words[c];
      sum[0] += 7.5f * (vf_sum(all) - w->by[g] * (float)rounded);
    }
    w->more[g] = form == KV_BY_INT4 ? vf_sum(sum) : 0;
  }
}

/* Computes o [G, width] = alpha o + p [G, KEYS] v, with v the values of a piece; alpha may be NULL: 1. */
static void kv_stream_values(const kv_stream *x, int64_t G, const float *p, const kv_stream_rows *piece,
                             kv_stream_next next, const float *alpha, float *o) {
  const kv_stream_rows v = *piece;
  kv_stream_weights w;
  if (v.form == KV_BY_INT8) kv_stream_weigh(KV_BY_INT8, v, x->D, G, p, &w);
  if (v.form == KV_BY_INT4) kv_stream_weigh(KV_BY_INT4, v, x->D, G, p, &w);
#define KV_CASE(as, count)                                                                              \
  case 4 * as + count:                                                                                  \
    if (KV_HAS(as) && as != KV_BY_BF16) kv_stream_values_of(as, count, p, &w, v, next, x->D, alpha, o); \
    break;
  switch (4 * (int)v.form + (int)G) { KV_EACH_FORM(KV_CASE) }
#undef KV_CASE
}
#endif
