/* Products of 16-bit words, two at a time, for few rows on many slots. They are used for keys of bf16, where the
 * processor multiplies pairs of bf16, and for packed rows. The 8-bit or 4-bit numbers of a packed row become integer
 * words without rounding. A query row, or a block's attention weights, become integer words times one scale; a word's
 * rounding error is at most 2^-16 of the largest number. The sums of integer products are exact in 32 bits. */
#ifndef KVEVICT_WORDS_H
#define KVEVICT_WORDS_H
#include "packed.h"

#if defined(__AVX2__) || defined(__aarch64__)
#define KV_WORDS 1
#else
#define KV_WORDS 0 /* no products of integer words: packed rows are multiplied as floats */
#endif
#if defined(__AVX512BF16__) && !KV_AMX /* on processors with tile registers, floats are faster */
#define KV_BF16_WORDS 1
#else
#define KV_BF16_WORDS 0
#endif
enum { WORDS = 2 * VL }; /* number of words in a vector */
#define KV_WORD_MOST 32767.0f

/* The form in which rows are multiplied: KV_FROM_*, as floats converted from that dtype; KV_BY_*, as 16-bit words of
 * bf16 or of packed rows. */
typedef enum {
  KV_FROM_F32 = KV_F32,
  KV_FROM_F16 = KV_F16,
  KV_FROM_BF16 = KV_BF16,
  KV_BY_BF16,
  KV_BY_INT8,
  KV_BY_INT4
} kv_form;

/* Returns the form in which rows stored as `kind` are multiplied: as words or, if that is not possible, the form
 * `floats`. */
static inline kv_form kv_form_of(kv_kind kind, kv_dtype dtype, int64_t D, kv_form floats) {
  if (kind == KV_AS_COMPUTED) return KV_BF16_WORDS && dtype == KV_BF16 && D % WORDS == 0 ? KV_BY_BF16 : floats;
  if (kind == KV_INT8 && KV_WORDS && D % WORDS == 0) return KV_BY_INT8;
  return kind == KV_INT4 && KV_WORDS && D % (2 * WORDS) == 0 ? KV_BY_INT4 : floats;
}

/* Rounds x [n] to integer words [n] times one scale; n is a multiple of VL. Returns the scale, or NaN if x has an inf
 * or a NaN. */
KV_INLINE float kv_words_of(const float *x, int64_t n, int16_t *restrict words) {
  vf most = vf_set1(0);
#pragma GCC unroll 4
  for (int64_t i = 0; i < n; i += VL) most = vf_max_nan(most, vf_load(x + i));
  const int finite = vf_sum(most * 0) == 0;
  const float top = finite ? vf_largest(most) : 0;
  const float by = finite && top > 1e-30f ? KV_WORD_MOST / top : 0;
  for (int64_t i = 0; i < n; i++) words[i] = (int16_t)(int32_t)(finite ? kv_nearest(x[i] * by) : 0);
  return finite ? top / KV_WORD_MOST : NAN;
}

/* Reads the scales and the least numbers of n packed rows into the arrays `scale` and `least` of 64 floats, whose rest
 * becomes 0. Rows of 8 bits have no least numbers; for them `least` is not written. */
KV_INLINE void kv_words_ends(kv_form form, int64_t D, const char *x, int64_t stride, int64_t n, float *scale,
                             float *least) {
  uint32_t ends[64];
  uint16_t half[2][64];
  x += form == KV_BY_INT8 ? D : D / 2;
#pragma GCC unroll 8
  for (int64_t c = 0; c < n; c++, x += stride) memcpy(ends + c, x, sizeof *ends);
  for (int64_t c = n; c < 64; c++) ends[c] = 0;
  if (form == KV_BY_INT8) {
    memcpy(scale, ends, sizeof ends);
    return;
  }
  for (int64_t c = 0; c < 64; c++) half[0][c] = (uint16_t)ends[c], half[1][c] = (uint16_t)(ends[c] >> 16);
  for (int64_t c = 0; c < 64; c += VL)
    vf_store(scale + c, vf_of_f16(half[0] + c)), vf_store(least + c, vf_of_f16(half[1] + c));
}

#if defined(__AVX512F__)
typedef __m512i kv_v16;
KV_INLINE vi vi_add_products(vi acc, kv_v16 a, kv_v16 b) {
#if defined(__AVX512BF16__) /* dispatch.c requires vpdpwssd, but no compiler flag here turns it on */
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
KV_INLINE kv_v16 kv_pair16(const int16_t *x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return _mm256_set1_epi32(pair);
}
KV_INLINE kv_v16 kv_low16(kv_v16 a, kv_v16 b) { return _mm256_unpacklo_epi16(a, b); }
KV_INLINE kv_v16 kv_high16(kv_v16 a, kv_v16 b) { return _mm256_unpackhi_epi16(a, b); }
#define KV_FIRST(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define KV_SECOND(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#elif defined(__aarch64__) /* vi_add_products adds products i and i + 4 to lane i, so kv_low16 joins halves */
typedef int16x8_t kv_v16;
KV_INLINE vi vi_add_products(vi acc, kv_v16 a, kv_v16 b) {
  return (vi)vmlal_high_s16(vmlal_s16((int32x4_t)acc, vget_low_s16(a), vget_low_s16(b)), a, b);
}
KV_INLINE kv_v16 kv_signed(const char *x) { return vmovl_s8(vld1_s8((const void *)x)); }
KV_INLINE kv_v16 kv_nibbles(const char *x, int high) {
  const uint8x8_t bytes = vld1_u8((const void *)x);
  return vreinterpretq_s16_u16(vmovl_u8(high ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(15))));
}
KV_INLINE kv_v16 kv_pair16(const int16_t *x) { return vcombine_s16(vld1_dup_s16(x), vld1_dup_s16(x + 1)); }
KV_INLINE kv_v16 kv_low16(kv_v16 a, kv_v16 b) { return vcombine_s16(vget_low_s16(a), vget_low_s16(b)); }
KV_INLINE kv_v16 kv_high16(kv_v16 a, kv_v16 b) { return vcombine_s16(vget_high_s16(a), vget_high_s16(b)); }
#define KV_FIRST(a, b) (a)
#define KV_SECOND(a, b) (b)
#else /* the form is never KV_BY_*, so these are never called */
typedef vi kv_v16;
KV_INLINE vi vi_add_products(vi acc, kv_v16 a, kv_v16 b) { return acc + a * b; }
KV_INLINE kv_v16 kv_signed(const char *x) { return (kv_v16)vu_load(x); }
KV_INLINE kv_v16 kv_nibbles(const char *x, int high) { return (kv_v16)vu_load(x) >> high; }
KV_INLINE kv_v16 kv_pair16(const int16_t *x) { return (kv_v16)vf_set1(*x); }
KV_INLINE kv_v16 kv_low16(kv_v16 a, kv_v16 b) { return a + b; }
KV_INLINE kv_v16 kv_high16(kv_v16 a, kv_v16 b) { return a + b; }
#define KV_FIRST(a, b) (a)
#define KV_SECOND(a, b) (b)
#endif

/* Returns acc + a0 b0 + a1 b1 in each lane, for the lane's pairs of words. Words of bf16 are summed as floats, integer
 * words as integers. */
KV_INLINE vf vf_add_words(kv_form form, vf acc, kv_v16 a, kv_v16 b) {
#if KV_BF16_WORDS
  if (form == KV_BY_BF16) return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  (void)form;
#endif
  return (vf)vi_add_products((vi)acc, a, b);
}
#endif
