/* Packed rows: stored keys or values with 8 or 4 bits a number, whose bytes kvevict.h defines. kv_pack_row makes the
 * bytes once, when a slot is stored; kv_unpack_row makes floats of them at each read. A row with an inf or a NaN gets a
 * scale of NaN; so does a 4-bit row whose scale or least number does not fit fp16. A row with a scale of NaN is read as
 * all NaN. */
#ifndef KVEVICT_PACKED_H
#define KVEVICT_PACKED_H
#include "half.h"
#include "simd.h"

/* Does one step of the Hadamard transform of x [n] in place: any two numbers at a distance of h become their sum and
 * difference. */
KV_INLINE void kv_butterflies(float *x, int64_t n, int64_t h) {
  for (int64_t i = 0; i < n; i += 2 * h)
    for (int64_t j = i; j < i + h; j += h < VL ? 4 : VL) {
      if (h < VL) {
        const v4 a = *(const v4_any *)(x + j), b = *(const v4_any *)(x + j + h);
        *(v4_any *)(x + j) = a + b, *(v4_any *)(x + j + h) = a - b;
      } else {
        const vf a = vf_load(x + j), b = vf_load(x + j + h);
        vf_store(x + j, a + b), vf_store(x + j + h, a - b);
      }
    }
}

/* Multiplies x [D] by the orthonormal Hadamard matrix of the largest power of two that divides D, block by block. The
 * matrix is its own inverse. */
static inline void kv_hadamard(float *x, int64_t D) {
  const int64_t size = D & -D;
  const float scale = 1 / sqrtf((float)size);
  for (int64_t i = 0; i < D; i += 4) { /* the steps of distance h = 1 and h = 2 */
    const v4 one = {1, -1, 1, -1}, two = {1, 1, -1, -1}, a = *(const v4_any *)(x + i);
    const v4 b = __builtin_shufflevector(a, a, 0, 0, 2, 2) + one * __builtin_shufflevector(a, a, 1, 1, 3, 3);
    const v4 c = __builtin_shufflevector(b, b, 0, 1, 0, 1) + two * __builtin_shufflevector(b, b, 2, 3, 2, 3);
    *(v4_any *)(x + i) = scale * c;
  }
  for (int64_t i = 0; i < D; i += size)
    for (int64_t h = 4; h < size; h *= 2) kv_butterflies(x + i, size, h);
}

/* Rounds x, |x| < 2^22, to the nearest integer, halves to even. */
static inline float kv_nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

/* The smallest and the largest of some numbers. other: whether one of them is inf or NaN. */
typedef struct {
  float least, most;
  uint32_t other;
} kv_range;

KV_INLINE kv_range kv_range_of(const float *restrict x, int64_t D) {
  kv_range y = {x[0], x[0], 0};
  for (int64_t d = 0; d < D; d++) {
    y.least = x[d] < y.least ? x[d] : y.least, y.most = x[d] > y.most ? x[d] : y.most;
    y.other |= (kv_bits(x[d]) & 0x7f800000u) == 0x7f800000u;
  }
  return y;
}

/* kv_store_int8 and kv_store_int4 write numbers x [D] as packed bytes and overwrite x; kv_load_int8 and kv_load_int4
 * read them back. The caller subtracts or adds the centre, and does or undoes the Hadamard transform. */
KV_INLINE void kv_store_int8(float *restrict x, uint8_t *restrict bytes, int64_t D) {
  const kv_range range = kv_range_of(x, D);
  const float size = -range.least > range.most ? -range.least : range.most, scale = range.other ? NAN : size / 127;
  const float by = scale > 0 ? scale : 1;
  for (int64_t d = 0; d < D; d++) {
    const float q = range.other ? 0 : x[d] / by;
    bytes[d] = (uint8_t)(int8_t)(int32_t)kv_nearest(q < -127 ? -127 : q > 127 ? 127 : q);
  }
  memcpy(bytes + D, &scale, sizeof scale);
}

KV_INLINE void kv_load_int8(const uint8_t *restrict bytes, float *restrict y, int64_t D) {
  float scale;
  memcpy(&scale, bytes + D, sizeof scale);
  for (int64_t d = 0; d < D; d++) y[d] = scale * (float)(int8_t)bytes[d];
}

KV_INLINE void kv_store_int4(float *restrict x, uint8_t *restrict bytes, int64_t D) {
  const kv_range range = kv_range_of(x, D);
  const uint16_t lo_bits = kv_f16_of_float(range.least);
  const float lo = kv_float_of_f16(lo_bits), span = kv_float_of_f16(kv_f16_of_float((range.most - lo) / 15));
  const int none = range.other || !isfinite(lo) || !isfinite(span);
  const float by = span > 0 && !none ? span : 1;
  const uint16_t ends[2] = {kv_f16_of_float(none ? NAN : span > 0 ? span : 0), none ? 0 : lo_bits};
  for (int64_t d = 0; d < D; d++) {
    const float q = none ? 0 : (x[d] - lo) / by;
    x[d] = kv_nearest(q < 0 ? 0 : q > 15 ? 15 : q);
  }
  for (int64_t d = 0; d < D / 2; d++) bytes[d] = (uint8_t)((int32_t)x[d] | (int32_t)x[d + D / 2] << 4);
  memcpy(bytes + D / 2, ends, sizeof ends);
}

KV_INLINE void kv_load_int4(const uint8_t *restrict bytes, float *restrict y, int64_t D) {
  uint16_t ends[2];
  memcpy(ends, bytes + D / 2, sizeof ends);
  const float scale = kv_float_of_f16(ends[0]), lo = kv_float_of_f16(ends[1]);
  for (int64_t d = 0; d < D / 2; d++) y[d] = scale * (float)(bytes[d] & 15) + lo;
  for (int64_t d = 0; d < D / 2; d++) y[d + D / 2] = scale * (float)(bytes[d] >> 4) + lo;
}

/* Packs x [D] as bytes at `to` and overwrites x. The centre [D], unless NULL, is subtracted first. */
static inline void kv_pack_row(kv_kind kind, const float *centre, float *restrict x, void *to, int64_t D) {
  for (int64_t d = 0; centre && d < D; d++) x[d] -= centre[d];
  if (kv_is_rotated(kind)) kv_hadamard(x, D);
#define KV_STORE(NAME, name, bits, rotated) \
  if (kind == KV_##NAME) kv_store_##name(x, to, D);
  KV_KINDS(KV_STORE)
#undef KV_STORE
}

/* Unpacks the bytes at `from` into floats y [D]. The centre [D], unless NULL, is added last. */
static inline void kv_unpack_row(kv_kind kind, const float *centre, const void *from, float *restrict y, int64_t D) {
#define KV_LOAD(NAME, name, bits, rotated) \
  if (kind == KV_##NAME) kv_load_##name(from, y, D);
  KV_KINDS(KV_LOAD)
#undef KV_LOAD
  if (kv_is_rotated(kind)) kv_hadamard(y, D);
  for (int64_t d = 0; centre && d < D; d++) y[d] += centre[d];
}
#endif
