/* Conversions between float and f16 or bf16, as branch-free loops over uint16_t: the compiler vectorises them for the
 * instruction set that the file is compiled for. */
#ifndef KVEVICT_HALF_H
#define KVEVICT_HALF_H
#include <string.h>

#include "kvevict.h"

static inline uint32_t kv_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static inline float kv_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/* Adds 112, the difference of the exponents' biases, to the f16's exponent; twice if that is all ones (inf, NaN). 0 and
 * denormals get an implicit leading one, which is then subtracted. */
static inline float kv_float_of_f16(uint16_t h) {
  const uint32_t top = 0x7c00u << 13, sign = (uint32_t)(h & 0x8000u) << 16;
  const uint32_t u = (uint32_t)(h & 0x7fffu) << 13, exponent = u & top;
  const uint32_t normal = u + (112u << 23) + (exponent == top ? 112u << 23 : 0u);
  const uint32_t denormal = kv_bits(kv_float(u + (113u << 23)) - kv_float(113u << 23));
  return kv_float((exponent == 0 ? denormal : normal) | sign);
}

/* Rounds to nearest even. For a denormal result, adding 0.5 shifts the result's ten bits to the end of the float, where
 * the addition rounds them. */
static inline uint16_t kv_f16_of_float(float x) {
  const uint32_t bits = kv_bits(x), u = bits & 0x7fffffffu;
  const uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
  const uint32_t denormal = kv_bits(kv_float(u) + 0.5f) - kv_bits(0.5f);
  const uint32_t over = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t small = u < (113u << 23) ? denormal : normal;
  return (uint16_t)((u >= (143u << 23) ? over : small) | ((bits >> 16) & 0x8000u));
}

static inline float kv_float_of_bf16(uint16_t h) { return kv_float((uint32_t)h << 16); }

/* Rounds to nearest even. A NaN keeps its upper bits and becomes quiet, since rounding could make it inf. */
static inline uint16_t kv_bf16_of_float(float x) {
  const uint32_t u = kv_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline int64_t kv_size(kv_dtype dtype) { return dtype == KV_F32 ? 4 : 2; }

/* Converts x [n] of dtype to floats y [n]. */
static inline void kv_load_row(kv_dtype dtype, const void *x, float *restrict y, int64_t n) {
  const uint16_t *restrict half = x;
  if (dtype == KV_F32) memcpy(y, x, (size_t)n * sizeof *y);
  if (dtype == KV_F16)
    for (int64_t i = 0; i < n; i++) y[i] = kv_float_of_f16(half[i]);
  if (dtype == KV_BF16)
    for (int64_t i = 0; i < n; i++) y[i] = kv_float_of_bf16(half[i]);
}

/* Converts floats x [n] to y [n] of dtype, rounding to nearest even. */
static inline void kv_store_row(kv_dtype dtype, const float *restrict x, void *y, int64_t n) {
  uint16_t *restrict half = y;
  if (dtype == KV_F32) memcpy(y, x, (size_t)n * sizeof *x);
  if (dtype == KV_F16)
    for (int64_t i = 0; i < n; i++) half[i] = kv_f16_of_float(x[i]);
  if (dtype == KV_BF16)
    for (int64_t i = 0; i < n; i++) half[i] = kv_bf16_of_float(x[i]);
}
#endif
