/* Vectors of floats for every instruction set, made of GCC's vector extensions, so that a kernel is written once.
 *
 * A file that includes this header is compiled once per instruction set, with -DKV_ISA=<name> and that set's flags.
 * Vectors are as wide as the flags allow, and KV_OP(attend) names the function kv_attend_<name>. A `vf` is a vector of
 * floats, a `vu` the same bits as uint32, a `vi` as int32. */
#ifndef KVEVICT_SIMD_H
#define KVEVICT_SIMD_H
#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kvevict.h"

/* -std=c11 forbids the compiler to contract a * b + c into one multiply-add instruction; these pragmas allow it. */
#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#if defined(__aarch64__) /* scheduling before register allocation would spill accumulators */
#pragma GCC optimize("no-schedule-insns")
#endif
#endif

#define KV_JOIN2(op, isa) kv_##op##_##isa
#define KV_JOIN(op, isa) KV_JOIN2(op, isa)
#define KV_OP(op) KV_JOIN(op, KV_ISA)
#define KV_INLINE static inline __attribute__((always_inline))

#define KV_PROTOTYPE(op, with) kv_status KV_OP(op)(const kv_##op *a);
KV_OPS(KV_PROTOTYPE, )

/* A vector has VL floats. A register tile is MR rows of NV vectors of sums; it leaves NV + 2 or more registers free. */
#if defined(__AVX512F__)
#define KV_VL 16
#define KV_NV 4
#elif defined(__AVX2__)
#define KV_VL 8
#define KV_NV 2
#elif defined(__aarch64__)
#define KV_VL 4
#define KV_NV 4
#else
#define KV_VL 4
#define KV_NV 2
#endif
enum { VL = KV_VL, MR = 6, NV = KV_NV };
#if defined(__AMX_BF16__)
#define KV_AMX 1
#else
#define KV_AMX 0
#endif

typedef float vf __attribute__((vector_size(4 * KV_VL)));
typedef uint32_t vu __attribute__((vector_size(4 * KV_VL)));
typedef int32_t vi __attribute__((vector_size(4 * KV_VL)));
typedef float vf_any __attribute__((vector_size(4 * KV_VL), aligned(4), may_alias)); /* may start at any float */
typedef uint32_t vu_any __attribute__((vector_size(4 * KV_VL), aligned(2), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef float v4_any __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t v4u __attribute__((vector_size(16)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v8_any __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t v8u __attribute__((vector_size(32)));

KV_INLINE vf vf_load(const float *x) { return *(const vf_any *)x; }
KV_INLINE void vf_store(float *x, vf a) { *(vf_any *)x = a; }
KV_INLINE vf vf_of_vi(vi x) { return __builtin_convertvector(x, vf); }
KV_INLINE vu vu_load(const void *x) { return *(const vu_any *)x; }

/* Loads VL 16-bit numbers, zero-extended to 32 bits. Intrinsics, since GCC makes seven instructions of its own vector
 * conversion. */
KV_INLINE vu vu_of_16bit(const void *x) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(x));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(x));
#else
  typedef uint16_t vh_any __attribute__((vector_size(2 * KV_VL), aligned(2), may_alias));
  return __builtin_convertvector(*(const vh_any *)x, vu);
#endif
}

/* Keeps x in a register from here on. Without it, the compiler reads x from memory at every use. */
#if defined(__x86_64__)
#define KV_KEEP(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define KV_KEEP(x) __asm__("" : "+w"(x))
#else
#define KV_KEEP(x) (void)0
#endif

/* Loads VL numbers of f16 as floats. */
KV_INLINE vf vf_of_f16(const void *x) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(x));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(x));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else /* as kv_float_of_f16, but one multiplication corrects the exponent of normal and denormal numbers */
  const vu u = vu_of_16bit(x), magnitude = (u & 0x7fff) << 13;
  const vu special = (vu)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
  return (vf)((vu)((vf)magnitude * 0x1p112f) | special | (u & 0x8000) << 16);
#endif
}

KV_INLINE vf vf_abs(vf a) { return (vf)((vu)a & 0x7fffffffu); }

KV_INLINE vf vf_set1(float a) {
#if KV_VL == 16
  return (vf){a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a};
#elif KV_VL == 8
  return (vf){a, a, a, a, a, a, a, a};
#else
  return (vf){a, a, a, a};
#endif
}

/* A pair is two bf16 in the 32 bits of a float, the first in the low half. In each lane, vf_dot_pairs returns acc + a0
 * b0 + a1 b1 for the lane's pair b and one pair a that all lanes share. vf_pairs rounds two vectors of floats to one
 * vector of pairs, each of two neighbouring floats; those of a come first. */
#if defined(__AVX512BF16__)
enum { KV_PAIRS = 1 };
KV_INLINE vf vf_dot_pairs(vf acc, float a, vf b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)vf_set1(a), (__m512bh)b);
}
KV_INLINE vf vf_pairs(vf a, vf b) { return (vf)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
enum { KV_PAIRS = 1 };
KV_INLINE vf vf_dot_pairs(vf acc, float a, vf b) {
  const float32x2_t pair = {a, 0};
  return (vf)vbfdotq_lane_f32((float32x4_t)acc, (bfloat16x8_t)b, (bfloat16x4_t)pair, 0);
}
KV_INLINE vf vf_pairs(vf a, vf b) {
  return (vf)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)a), (float32x4_t)b);
}
#else /* never called, since KV_PAIRS is 0 */
enum { KV_PAIRS = 0 };
KV_INLINE vf vf_dot_pairs(vf acc, float a, vf b) { return acc + a * b; }
KV_INLINE vf vf_pairs(vf a, vf b) { return a + b; }
#endif

/* Returns a where mask is all ones, b where it is 0. */
KV_INLINE vf vf_select(vu mask, vf a, vf b) { return (vf)(((vu)a & mask) | ((vu)b & ~mask)); }

/* vf_max and vf_min return b if a or b is NaN, as x86's instructions do. Intrinsics, since compilers do not turn
 * comparisons into these instructions. */
#if defined(__AVX512F__)
KV_INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
KV_INLINE vf vf_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
KV_INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
KV_INLINE vf vf_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
KV_INLINE vf vf_max(vf a, vf b) { return vf_select((vu)(a > b), a, b); }
KV_INLINE vf vf_min(vf a, vf b) { return vf_select((vu)(a < b), a, b); }
#endif

/* Returns the larger of |a| and |b|, or NaN if either is NaN: as integers, the bits of numbers >= 0 have the same
 * order, with NaN last. */
KV_INLINE vf vf_max_nan(vf a, vf b) {
  const vu x = (vu)a & 0x7fffffffu, y = (vu)b & 0x7fffffffu;
  return vf_select((vu)(x > y), (vf)x, (vf)y);
}

/* Adds the halves of a vector until four lanes remain, and returns these. */
KV_INLINE v4 v4_of_sum(vf a) {
#if KV_VL == 4
  return a;
#else
#if KV_VL == 16
  const v8 x = __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const v8 x = a;
#endif
  return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#endif
}

KV_INLINE float vf_sum(vf a) {
  const v4 x = v4_of_sum(a);
  return (x[0] + x[2]) + (x[1] + x[3]);
}

/* Returns a vector whose lane i is the sum of all lanes of the i-th argument. */
KV_INLINE v4 v4_sums(vf a, vf b, vf c, vf d) {
  const v4 x = v4_of_sum(a), y = v4_of_sum(b), z = v4_of_sum(c), w = v4_of_sum(d);
  const v4 xy = __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7);
  const v4 zw = __builtin_shufflevector(z, w, 0, 4, 1, 5) + __builtin_shufflevector(z, w, 2, 6, 3, 7);
  return __builtin_shufflevector(xy, zw, 0, 1, 4, 5) + __builtin_shufflevector(xy, zw, 2, 3, 6, 7);
}

/* Returns a vector whose lane i is the sum of all lanes of x[i], for the VL vectors x, added in the order of vf_sum.
 * whole: the lanes of x are integers; their sums are returned as floats. */
KV_INLINE vf vf_sums(int whole, const vf *x) {
#define KV_ADD(a, b) (whole ? (vf)((vi)(a) + (vi)(b)) : (vf)(a) + (vf)(b))
#if defined(__AVX512F__)
  vf quad[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    vf half[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const __m512 a = (__m512)x[i + 8 * j], b = (__m512)x[i + 8 * j + 4];
      half[j] = KV_ADD(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
    }
    const __m512 a = (__m512)half[0], b = (__m512)half[1];
    quad[i] = KV_ADD(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const __m512d a = (__m512d)quad[i], b = (__m512d)quad[i + 1];
    quad[i] = KV_ADD(_mm512_mask_blend_pd(0xaa, a, b), _mm512_shuffle_pd(a, b, 0x55));
  }
  const __m512 a = (__m512)quad[0], b = (__m512)quad[2];
  const vf sums = KV_ADD(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
  return whole ? vf_of_vi((vi)sums) : sums;
#else
  vf sums;
#pragma GCC unroll 2
  for (int i = 0; i < VL; i += 4) {
    vf y[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) y[j] = whole ? vf_of_vi((vi)x[i + j]) : x[i + j];
    const v4 four = v4_sums(y[0], y[1], y[2], y[3]);
    memcpy((char *)&sums + 4 * i, &four, sizeof four);
  }
  return sums;
#endif
#undef KV_ADD
}

KV_INLINE v4 v4_max(v4 a, v4 b) {
  const v4u m = (v4u)(a > b);
  return (v4)(((v4u)a & m) | ((v4u)b & ~m));
}

/* Returns the largest lane of a vector without NaN. */
KV_INLINE float vf_largest(vf a) {
#if KV_VL == 16
  v4 x = v4_max(v4_max(__builtin_shufflevector(a, a, 0, 1, 2, 3), __builtin_shufflevector(a, a, 4, 5, 6, 7)),
                v4_max(__builtin_shufflevector(a, a, 8, 9, 10, 11), __builtin_shufflevector(a, a, 12, 13, 14, 15)));
#elif KV_VL == 8
  v4 x = v4_max(__builtin_shufflevector(a, a, 0, 1, 2, 3), __builtin_shufflevector(a, a, 4, 5, 6, 7));
#else
  v4 x = a;
#endif
  x = v4_max(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
  return x[0] > x[1] ? x[0] : x[1];
}

/* Returns ||x - y||_p of x [D] and y [D]; D is a multiple of 8, p is 1 or 2. */
KV_INLINE float kv_distance(const float *x, const float *y, int64_t D, int p) {
  v8 sum = {0};
  for (int64_t d = 0; d < D; d += 8) {
    const v8 by = *(const v8_any *)(x + d) - *(const v8_any *)(y + d);
    sum += p == 2 ? by * by : (v8)((v8u)by & 0x7fffffffu);
  }
  const float all = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  return p == 2 ? sqrtf(all) : all;
}

/* Returns ||x||_p of x [D], computed as kv_distance does. */
KV_INLINE float kv_norm_of(const float *x, int64_t D, int p) {
  static const float zeros[KV_MOST_D];
  return kv_distance(x, zeros, D, p);
}

/* Returns 2^x = 2^n * 2^f, n the integer nearest to x. Adding 1.5 * 2^23 to x leaves n in the sum's low bits, and
 * adding 127 more makes those bits the exponent of 2^n. |f| <= 1/2; the polynomial for 2^f has a relative error of
 * 9e-8. The result is 0 for x below -126.5, inf from 127.5 on, and NaN for NaN. */
KV_INLINE vf vf_exp2(vf x) {
  x = vf_min(vf_set1(128), vf_max(vf_set1(-127), x));
  const vf t = x + (12582912.0f + 127), f = x - (t - (12582912.0f + 127));
  vf p = f * 1.3264708686619997e-3f + 9.671511128544807e-3f;
  p = f * p + 5.550733953714371e-2f;
  p = f * p + 2.4022242426872253e-1f;
  p = f * p + 6.931470036506653e-1f;
  p = f * p + 1.0f;
  return p * (vf)((vu)t << 23);
}

/* Returns tanh x. Near 0 it is an odd polynomial, since 1 - 2 / (e^2x + 1) would cancel there. */
KV_INLINE vf vf_tanh(vf x) {
  const vf z = x * x;
  vf p = z * -5.528614390641451e-3f + 2.048329822719097e-2f;
  p = z * p - 5.369296297430992e-2f;
  p = z * p + 1.333089917898178e-1f;
  p = z * p - 3.333326280117035e-1f;
  const vf far = 1.0f - 2.0f / (vf_exp2(x * 2.8853900817779268f) + 1.0f);
  return vf_select((vu)(z < 0.36f), x + x * z * p, far);
}
#endif
