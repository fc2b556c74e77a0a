/* One head's key or value rows, read where they are, 16 bytes at a time. E is float, f16 or bf16. */
#ifndef KV_ROWS_CUH
#define KV_ROWS_CUH
#include "kvevict.h"
#include "ptx.cuh"

template <class E>
constexpr int VECTOR = 16 / sizeof(E); /* numbers of 16 bytes */

/* The alive columns [stored | new] of one (b, kv head): column c < len is stored row c, the others follow in `fresh`. */
template <class E>
struct Columns {
  const E *stored, *fresh; /* [len, D], [n - len, D] */
  int64_t fresh_stride;
  int len, n, D;
  __device__ __forceinline__ const E *operator[](int c) const {
    return c < len ? stored + (int64_t)c * D : fresh + (c - len) * fresh_stride;
  }
};

/* slots: the layer's [rows, D]; fresh: [B, Hkv, S, D] with strides b, h, s, of which columns first .. stop - 1 are
 * alive. */
template <class E>
static __device__ __forceinline__ Columns<E> columns_of(const kv_slots &slots, const void *stored, const void *fresh,
                                                        const int64_t (&stride)[3], int64_t b, int64_t h, int64_t head,
                                                        int first, int stop, int64_t D) {
  const E *from = static_cast<const E *>(fresh) + b * stride[0] + h * stride[1] + first * stride[2];
  const int len = slots.len[head];
  return {static_cast<const E *>(stored) + slots.offset[head] * D, from, stride[2], len, len + stop - first, (int)D};
}

template <class E>
static __device__ __forceinline__ void floats_of(uint4 v, float (&x)[VECTOR<E>]) {
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(E) == 4) {
      x[i] = __uint_as_float(word[i]);
    } else {
      const float2 two = unpack<E>(word[i]);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
}

/* Calls run(E()) with the type that dtype stands for. */
template <class Run>
static int with_type(kv_dtype dtype, Run run) {
  if (dtype == KV_F16) return run(f16());
  if (dtype == KV_BF16) return run(bf16());
  return run(float());
}
#endif
