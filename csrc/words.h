/* Packed rows multiplied as words of 16 bits, for few rows on many slots: numbers of 8 and 4 bits become words without
 * a rounding, a query row or the weights of a block words times their scale. Sums of products are exact in 32 bits, and
 * only the query, to 2^-16 of its largest number, and the weights, to 2^-16 of the largest, are rounded. */
#ifndef KVEVICT_WORDS_H
#define KVEVICT_WORDS_H
#include "packed.h"

#if defined(__AVX2__) || defined(__aarch64__)
#define KV_WORDS 1
#else
#define KV_WORDS 0 /* rows are restored as floats */
#endif
enum { WORDS = 2 * VL }; /* of a vector */
#define KV_WORD_MOST 32767.0f

typedef int32_t vi __attribute__((vector_size(4 * KV_VL)));
typedef vi vi_any __attribute__((aligned(2), may_alias));

/* Whether rows of this kind can be read so; others are restored as floats. */
static inline int kv_has_words(kv_packing packing, int64_t D) {
  return KV_WORDS && ((packing == KV_INT8 && D % WORDS == 0) || (packing == KV_INT4 && D % (2 * WORDS) == 0));
}

/* x [n], n a multiple of VL, as words [n] times the scale that is returned, NaN if a number is not finite. */
static inline float kv_words_of(const float *x, int64_t n, int16_t *restrict words) {
  vf most = vf_set1(0);
  for (int64_t i = 0; i < n; i += VL) most = vf_max_nan(most, vf_load(x + i));
  const int finite = vf_sum(most * 0) == 0;
  const float top = finite ? vf_largest(most) : 0;
  const float by = finite && top > 1e-30f ? KV_WORD_MOST / top : 0;
  for (int64_t i = 0; i < n; i++) words[i] = (int16_t)(int32_t)(finite ? kv_nearest(x[i] * by) : 0);
  return finite ? top / KV_WORD_MOST : NAN;
}

/* The scales and least numbers of n packed rows, 0 from there to `padded`; rows of 8 bits have no least numbers. */
static inline void kv_words_ends(kv_packing packing, int64_t D, const char *x, int64_t stride, int64_t n,
                                 int64_t padded, float *scale, float *least) {
  uint16_t ends[2][64] = {{0}, {0}};
  x += packing == KV_INT8 ? D : D / 2;
  for (int64_t c = 0; c < n; c++, x += stride)
    if (packing == KV_INT8)
      memcpy(scale + c, x, sizeof *scale);
    else
      memcpy(&ends[0][c], x, 2), memcpy(&ends[1][c], x + 2, 2);
  for (int64_t c = n; c < padded; c++) scale[c] = 0;
  if (packing == KV_INT4)
    for (int64_t c = 0; c < padded; c += VL)
      vf_store(scale + c, vf_of_f16(&ends[0][c])), vf_store(least + c, vf_of_f16(&ends[1][c]));
}

#if defined(__AVX512F__)
typedef __m512i kv_v16;
KV_INLINE vi vi_add_products(vi acc, kv_v16 a, kv_v16 b) {
#if defined(__AVX512BF16__) /* dispatch.c asks for vpdpwssd too, though no flag turns it on */
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#else
  return (vi)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(a, b));
#endif
}
KV_INLINE kv_v16 kv_signed(const char *x) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)x)); }
KV_INLINE kv_v16 kv_nibbles(const char *x, int high) {
  const __m256i bytes = _mm256_loadu_si256((const void *)x);
  return _mm512_cvtepu8_epi16(_mm256_and_si256(high ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15)));
}
KV_INLINE kv_v16 kv_load16(const int16_t *x) { return _mm512_loadu_si512(x); }
KV_INLINE kv_v16 kv_pair16(const int16_t *x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return _mm512_set1_epi32(pair);
}
KV_INLINE kv_v16 kv_low16(kv_v16 a, kv_v16 b) { return _mm512_unpacklo_epi16(a, b); }
KV_INLINE kv_v16 kv_high16(kv_v16 a, kv_v16 b) { return _mm512_unpackhi_epi16(a, b); }
#define KV_FIRST(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
#define KV_SECOND(a, b) __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)
#elif defined(__AVX2__)
typedef __m256i kv_v16;
KV_INLINE vi vi_add_products(vi acc, kv_v16 a, kv_v16 b) {
  return (vi)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(a, b));
}
KV_INLINE kv_v16 kv_signed(const char *x) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)x)); }
KV_INLINE kv_v16 kv_nibbles(const char *x, int high) {
  const __m128i bytes = _mm_loadu_si128((const void *)x);
  return _mm256_cvtepu8_epi16(_mm_and_si128(high ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15)));
}
KV_INLINE kv_v16 kv_load16(const int16_t *x) { return _mm256_loadu_si256((const void *)x); }
KV_INLINE kv_v16 kv_pair16(const int16_t *x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return _mm256_set1_epi32(pair);
}
KV_INLINE kv_v16 kv_low16(kv_v16 a, kv_v16 b) { return _mm256_unpacklo_epi16(a, b); }
KV_INLINE kv_v16 kv_high16(kv_v16 a, kv_v16 b) { return _mm256_unpackhi_epi16(a, b); }
#define KV_FIRST(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define KV_SECOND(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#elif defined(__aarch64__) /* lane i adds the products of words i and i + 4: of two rows, halves of them side by side */
typedef int16x8_t kv_v16;
KV_INLINE vi vi_add_products(vi acc, kv_v16 a, kv_v16 b) {
  return (vi)vmlal_high_s16(vmlal_s16((int32x4_t)acc, vget_low_s16(a), vget_low_s16(b)), a, b);
}
KV_INLINE kv_v16 kv_signed(const char *x) { return vmovl_s8(vld1_s8((const void *)x)); }
KV_INLINE kv_v16 kv_nibbles(const char *x, int high) {
  const uint8x8_t bytes = vld1_u8((const void *)x);
  return vreinterpretq_s16_u16(vmovl_u8(high ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(15))));
}
KV_INLINE kv_v16 kv_load16(const int16_t *x) { return vld1q_s16(x); }
KV_INLINE kv_v16 kv_pair16(const int16_t *x) { return vcombine_s16(vld1_dup_s16(x), vld1_dup_s16(x + 1)); }
KV_INLINE kv_v16 kv_low16(kv_v16 a, kv_v16 b) { return vcombine_s16(vget_low_s16(a), vget_low_s16(b)); }
KV_INLINE kv_v16 kv_high16(kv_v16 a, kv_v16 b) { return vcombine_s16(vget_high_s16(a), vget_high_s16(b)); }
#define KV_FIRST(a, b) (a)
#define KV_SECOND(a, b) (b)
#endif

#if KV_WORDS
KV_INLINE vf vf_of_vi(vi x) { return __builtin_convertvector(x, vf); }

/* Words of a row at d: half 0 of rows of 4 bits are the numbers d.., half 1 those from D / 2 + d. */
KV_INLINE kv_v16 kv_row16(kv_packing packing, const char *row, int half) {
  return packing == KV_INT8 ? kv_signed(row) : kv_nibbles(row, half);
}

#if defined(__AVX512F__)
/* The sums of 16 vectors: lane 4 g + i is that of acc[g][i]. */
KV_INLINE vi vi_sums(vi acc[4][4]) {
  vi x[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) { /* vector k is acc[k % 4][k / 4] */
    const __m512i a = (__m512i)acc[2 * i % 4][i / 2], b = (__m512i)acc[2 * i % 4 + 1][i / 2];
    x[i] = (vi)_mm512_shuffle_i64x2(a, b, 0x44) + (vi)_mm512_shuffle_i64x2(a, b, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = (__m512i)x[2 * i], b = (__m512i)x[2 * i + 1];
    x[8 + i] = (vi)_mm512_shuffle_i32x4(a, b, 0x88) + (vi)_mm512_shuffle_i32x4(a, b, 0xdd);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m512i a = (__m512i)x[8 + 2 * i], b = (__m512i)x[9 + 2 * i];
    x[12 + i] = (vi)_mm512_unpacklo_epi64(a, b) + (vi)_mm512_unpackhi_epi64(a, b);
  }
  const __m512 a = (__m512)x[12], b = (__m512)x[13];
  return (vi)_mm512_shuffle_ps(a, b, 0x88) + (vi)_mm512_shuffle_ps(a, b, 0xdd);
}
#endif

/* s [G, apart] of `slots` columns = q [G, D] . the numbers of packed rows, without their scales. */
KV_INLINE void kv_words_dots(kv_packing packing, int G, int slots, const int16_t *q, int64_t D, const char *x,
                             int64_t stride, float *s, int64_t apart) {
  const int64_t end = packing == KV_INT8 ? D : D / 2;
  vi acc[4][4] = {{{0}}};
  for (int64_t d = 0; d < end; d += WORDS)
    for (int half = 0; half < (packing == KV_INT8 ? 1 : 2); half++) {
      kv_v16 y[4];
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) y[g] = kv_load16(q + g * D + half * (D / 2) + d);
#pragma GCC unroll 4
      for (int i = 0; i < slots; i++) {
        const kv_v16 row = kv_row16(packing, x + i * stride + d, half);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) acc[g][i] = vi_add_products(acc[g][i], row, y[g]);
      }
    }
#if defined(__AVX512F__)
  if (G == 4 && slots == 4) {
    float sums[VL];
    vf_store(sums, vf_of_vi(vi_sums(acc)));
    for (int g = 0; g < 4; g++) *(v4_any *)(s + g * apart) = *(const v4_any *)(sums + 4 * g);
    return;
  }
#endif
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
    if (slots == 1)
      s[g * apart] = vf_sum(vf_of_vi(acc[g][0]));
    else
      *(v4_any *)(s + g * apart) =
          v4_sums(vf_of_vi(acc[g][0]), vf_of_vi(acc[g][1]), vf_of_vi(acc[g][2]), vf_of_vi(acc[g][3]));
}

/* o [G, D] = alpha o + by (w [G, 64] numbers of n packed rows) + more, at `halves` vectors of words from d on. */
KV_INLINE void kv_words_sum(kv_packing packing, int G, int halves, const int16_t *w, const char *x, int64_t stride,
                            int64_t n, int64_t D, const float *alpha, const float *by, const float *more, float *o) {
  const int64_t step = packing == KV_INT8 ? WORDS : D / 2; /* from one vector of words to the other, in numbers */
  vi acc[4][4] = {{{0}}};
  for (int64_t c = 0; c < n; c += 2, x += 2 * stride) {
    const char *next = c + 1 < n ? x + stride : x; /* its weight is 0 */
#pragma GCC unroll 2
    for (int j = 0; j < halves; j++) {
      const int64_t at = packing == KV_INT8 ? j * WORDS : 0;
      const kv_v16 a = kv_row16(packing, x + at, j), b = kv_row16(packing, next + at, j);
      const kv_v16 low = kv_low16(a, b), high = kv_high16(a, b);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const kv_v16 y = kv_pair16(w + g * 64 + c);
        acc[g][2 * j] = vi_add_products(acc[g][2 * j], low, y);
        acc[g][2 * j + 1] = vi_add_products(acc[g][2 * j + 1], high, y);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 2
    for (int j = 0; j < halves; j++) {
      const vf low = vf_of_vi(acc[g][2 * j]), high = vf_of_vi(acc[g][2 * j + 1]);
      const vf first = KV_FIRST(low, high), second = KV_SECOND(low, high);
      float *to = o + g * D + j * step;
      vf_store(to, alpha[g] * vf_load(to) + by[g] * first + more[g]);
      vf_store(to + VL, alpha[g] * vf_load(to + VL) + by[g] * second + more[g]);
    }
}

#if defined(__AVX512F__) || defined(__aarch64__)
enum { KV_WORDS_TOGETHER = 4 }; /* query rows, at most */
#else
enum { KV_WORDS_TOGETHER = 2 };
#endif

KV_INLINE void kv_words_logits_of(kv_packing packing, int G, const int16_t *q, int64_t D, const char *x, int64_t stride,
                                  int64_t n, uintptr_t next, int64_t next_stride, float *s, int64_t apart) {
  int64_t c = 0;
  for (; c + 4 <= n; c += 4, x += 4 * stride) {
    if (next)
      for (int64_t at = c * next_stride; at < (c + 4) * next_stride; at += 64)
        __builtin_prefetch((const void *)(next + (uintptr_t)at), 0, 2);
    kv_words_dots(packing, G, 4, q, D, x, stride, s + c, apart);
  }
  for (; c < n; c++, x += stride) kv_words_dots(packing, G, 1, q, D, x, stride, s + c, apart);
}

KV_INLINE void kv_words_values_of(kv_packing packing, int G, const int16_t *w, const char *x, int64_t stride, int64_t n,
                                  int64_t D, const float *alpha, const float *by, const float *more, float *o) {
  if (packing == KV_INT4)
    for (int64_t d = 0; d < D / 2; d += WORDS)
      kv_words_sum(packing, G, 2, w, x + d, stride, n, D, alpha, by, more, o + d);
  else
    for (int64_t d = 0; d < D; d += 2 * WORDS)
      if (d + 2 * WORDS <= D)
        kv_words_sum(packing, G, 2, w, x + d, stride, n, D, alpha, by, more, o + d);
      else
        kv_words_sum(packing, G, 1, w, x + d, stride, n, D, alpha, by, more, o + d);
}

#define KV_EACH_COUNT(X, packing) X(packing, 1) X(packing, 2) X(packing, 3) X(packing, 4)
#define KV_EACH_KIND(X) KV_EACH_COUNT(X, KV_INT8) KV_EACH_COUNT(X, KV_INT4)

/* s [G, apart], n <= 64 columns of it, = q . k of packed rows, in the queries' scale. q [G, D] words with their scales,
 * their sums and a term of every column, [G]. */
static inline void kv_words_logits(kv_packing packing, int64_t G, const int16_t *q, const float *q_scale,
                                   const float *q_sum, const float *q_more, int64_t D, const char *x, int64_t stride,
                                   int64_t n, uintptr_t next, int64_t next_stride, float *s, int64_t apart) {
  float scale[64], least[64];
  const int64_t padded = (n + VL - 1) / VL * VL;
  for (int64_t g = 0, some; g < G; g += some) {
    some = G - g < KV_WORDS_TOGETHER ? G - g : KV_WORDS_TOGETHER;
#define KV_CASE(kind, count)            \
  if (packing == kind && some == count) \
    kv_words_logits_of(kind, count, q + g * D, D, x, stride, n, g ? 0 : next, next_stride, s + g * apart, apart);
    KV_EACH_KIND(KV_CASE)
#undef KV_CASE
  }
  kv_words_ends(packing, D, x, stride, n, padded, scale, least);
  for (int64_t g = 0; g < G; g++) {
    float *restrict logit = s + g * apart;
    const float by = q_scale[g], sum = q_sum[g], more = q_more[g];
    if (packing == KV_INT4)
      for (int64_t c = 0; c < n; c++) logit[c] = logit[c] * (by * scale[c]) + (sum * least[c] + more);
    else
      for (int64_t c = 0; c < n; c++) logit[c] = logit[c] * (by * scale[c]) + more;
  }
}

/* o [G, D] = alpha o + p [G, apart] times n <= 64 packed rows; those of 4 bits leave it rotated. alpha NULL: 1. */
static inline void kv_words_values(kv_packing packing, int64_t G, const float *p, int64_t apart, const char *x,
                                   int64_t stride, int64_t n, int64_t D, const float *alpha, float *o) {
  float scale[64], least[64], weight[64], by[4], more[4], factor[4];
  int16_t w[4 * 64];
  const int64_t padded = (n + VL - 1) / VL * VL;
  kv_words_ends(packing, D, x, stride, n, padded, scale, least);
  for (int64_t g = 0; g < G; g++) {
    vf sum = vf_set1(0);
    for (int64_t c = 0; c < padded; c += VL) {
      vf y = vf_load(p + g * apart + c);
      for (int i = 0; i < VL && c + VL > n; i++) y[i] = c + i < n ? y[i] : 0; /* p of another piece */
      vf_store(weight + c, y * vf_load(scale + c));
      if (packing == KV_INT4) sum += y * vf_load(least + c);
    }
    memset(w + g * 64, 0, 64 * sizeof *w);
    by[g] = kv_words_of(weight, padded, w + g * 64);
    if (packing == KV_INT4) { /* the rounding of weights times 7.5, the middle of 4 bits, is taken out */
      vf exact = vf_set1(0);
      int32_t rounded = 0;
      for (int64_t c = 0; c < padded; c += VL) exact += vf_load(weight + c);
      for (int64_t c = 0; c < padded; c++) rounded += w[g * 64 + c];
      sum[0] += 7.5f * (vf_sum(exact) - by[g] * (float)rounded);
    }
    more[g] = vf_sum(sum), factor[g] = alpha ? alpha[g] : 1;
  }
  for (int64_t g = 0, some; g < G; g += some) {
    some = G - g < KV_WORDS_TOGETHER ? G - g : KV_WORDS_TOGETHER;
#define KV_CASE(kind, count)            \
  if (packing == kind && some == count) \
    kv_words_values_of(kind, count, w + g * 64, x, stride, n, D, factor + g, by + g, more + g, o + g * D);
    KV_EACH_KIND(KV_CASE)
#undef KV_CASE
  }
}
#else /* never called */
static inline void kv_words_logits(kv_packing packing, int64_t G, const int16_t *q, const float *q_scale,
                                   const float *q_sum, const float *q_more, int64_t D, const char *x, int64_t stride,
                                   int64_t n, uintptr_t next, int64_t next_stride, float *s, int64_t apart) {
  (void)packing, (void)G, (void)q, (void)q_scale, (void)q_sum, (void)q_more, (void)D, (void)x, (void)stride, (void)n;
  (void)next, (void)next_stride, (void)s, (void)apart;
}
static inline void kv_words_values(kv_packing packing, int64_t G, const float *p, int64_t apart, const char *x,
                                   int64_t stride, int64_t n, int64_t D, const float *alpha, float *o) {
  (void)packing, (void)G, (void)p, (void)apart, (void)x, (void)stride, (void)n, (void)D, (void)alpha, (void)o;
}
#endif
#endif
