/* Vectors of 16 bytes, the unit of reads; unrolled loops; choice of a kernel by dtype. E is float, f16 or bf16. */
#ifndef KV_VECTOR_CUH
#define KV_VECTOR_CUH
#include "ptx.cuh"
#include "segments.h"

template <class E>
constexpr int VECTOR = 16 / (int)sizeof(E); /* numbers of type E in 16 bytes */

template <class E>
KV_DEVICE void vector_floats(uint4 v, float (&x)[VECTOR<E>]) {
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

/* Calls f(i, j) for all 0 <= i < N and 0 <= j < M; both are constants once the loops are unrolled. */
template <int N, int M, class F>
KV_DEVICE void unrolled(F f) {
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int j = 0; j < M; j++) f(i, j);
}

/* Calls f(E{}), with E the element type of dtype. */
template <class F>
static int dispatch(kv_dtype dtype, F f) {
  return dtype == KV_F16 ? f(f16{}) : dtype == KV_BF16 ? f(bf16{}) : f(float{});
}
#endif
