/* The rows and columns of an attention matrix: where they are in memory, which of them see which, how the logits come
 * from q.k. Shared by attend and what observes. */
#ifndef KV_SIGHT_CUH
#define KV_SIGHT_CUH
#include <type_traits>

#include "kvevict.h"
#include "tile.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

/* The alive columns [stored | new] of one (b, kv head), as addresses: those of columns that are not there are never
 * read, but computed. */
struct Columns {
  uint64_t stored, fresh;          /* where column 0 of either would be */
  int stored_stride, fresh_stride; /* in bytes */
  int len, n;

  __device__ __forceinline__ uint64_t at(int c) const {
    return (c < len ? stored : fresh) + (int64_t)c * (c < len ? stored_stride : fresh_stride);
  }
};

/* stored: the layer's [rows, D], this head's from row `offset` on; fresh [B, Hkv, S, D], of which columns first ..
 * stop - 1 are alive. */
template <class E>
static __device__ __forceinline__ Columns columns_of(const void *stored, int64_t offset, int len, int dims,
                                                     const void *fresh, const int64_t *stride, int b, int h, int first,
                                                     int stop) {
  const int64_t size = sizeof(E), at = b * stride[0] + h * stride[1] + (first - len) * stride[2];
  const bool none = stop <= first; /* then fresh and its strides may be anything, and copies of nothing start at 0 */
  return {(uint64_t)stored + offset * dims * size,
          none ? 0 : (uint64_t)fresh + at * size,
          dims * (int)size,
          none ? 0 : (int)(stride[2] * size),
          len,
          len + stop - first};
}

/* r / n by a multiplication, for 0 <= r < 2^32 / n. */
struct Divisor {
  int n;
  uint32_t inverse; /* 2^32 / n, rounded up */

  __device__ __forceinline__ int of(int r) const { return n == 1 ? r : (int)((uint64_t)r * inverse >> 32); }
};

static __device__ __forceinline__ Divisor divisor(int n) { return {n, 0xffffffffu / n + 1}; }

/* The rows of some heads of a group, time-major over them: row r is head `head` + r % heads at step `from` + r / heads. */
struct Rows {
  int head, from, count;
  Divisor heads;

  __device__ __forceinline__ int step(int r) const { return from + heads.of(r); }
  __device__ __forceinline__ int head_of(int r) const { return head + r - heads.of(r) * heads.n; }
};

/* Where they are in memory: head r % heads at step r / heads from `x` on. */
struct RowsAt {
  uint64_t x;
  int head_stride, step_stride; /* in bytes */
  Divisor heads;
  int n;

  __device__ __forceinline__ uint64_t at(int r) const {
    const int step = heads.of(r);
    return x + (int64_t)(r - step * heads.n) * head_stride + (int64_t)step * step_stride;
  }
};

/* x: elements E by strides of b, head and step; b: what that of b comes to. */
template <class E>
static __device__ __forceinline__ RowsAt rows_at(const Rows &rows, const void *x, int64_t b, int64_t head_stride,
                                                 int64_t step_stride) {
  const int64_t size = sizeof(E), at = b + rows.head * head_stride + rows.from * step_stride;
  return {(uint64_t)x + at * size, (int)(head_stride * size), (int)(step_stride * size), rows.heads, rows.count};
}

/* Step t sees the columns 0 .. clamp(shift + t + 1, least, n) - 1. */
struct Sight {
  int shift, least, n;

  __device__ __forceinline__ int seen(int t) const { return min(max(shift + t + 1, least), n); }
};

/* How the logits come from s = q.k. In log2 units they are scale * of(s), with scale > 0. */
struct Logits {
  bool bent; /* of(s) is not s itself */
  float before, cap, scale;

  __device__ __forceinline__ float of(float s) const { return cap > 0 ? cap * tanhf(before * s) : before * s; }
};

static inline Logits logits_of(float scale, float softcap) {
  if (softcap > 0) return {true, scale / softcap, softcap * LOG2E, 1};
  if (scale > 0) return {false, 0, 0, scale * LOG2E};
  return {true, scale * LOG2E, 0, 1};
}

/* s -> of(s) */
template <int MT, int NT>
static __device__ __forceinline__ void bend(float (&s)[MT][NT][4], const Logits &logits) {
  if (!logits.bent) return;
#pragma unroll
  for (int i = 0; i < MT * NT * 4; i++) s[i / 4 / NT][i / 4 % NT][i % 4] = logits.of(s[i / 4 / NT][i / 4 % NT][i % 4]);
}

/* WARPS warps of 16 MT query rows each against KEYS keys. 32 rows a warp use each fragment of K and V twice; where their
 * O does not fit the registers it is 16. In shared memory are the rows and two tiles of keys or values: at most 96 KiB. */
template <class E, int D>
struct RowTile {
  static constexpr bool HALF = sizeof(E) == 2;
  static constexpr int WARPS = !HALF && D == 256 ? 2 : 4, MT = HALF && D < 256 ? 2 : 1, ROWS = WARPS * MT * 16;
  static constexpr int KEYS = HALF && D == 64 ? 128 : !HALF && D == 256 ? 32 : 64, THREADS = WARPS * 32;
  static constexpr int STEPS = KEYS > 64 ? 1 : 2; /* of multiply; more do not fit the registers */
  static constexpr size_t SHARED = (size_t)(ROWS + 2 * KEYS) * D * sizeof(E);
};

/* f(E{}, std::integral_constant<int, D>{}) */
template <class F>
static int dispatch(kv_dtype dtype, int64_t dims, F f) {
  const auto with = [&](auto e) {
    if (dims <= 64) return f(e, std::integral_constant<int, 64>{});
    if (dims <= 96) return f(e, std::integral_constant<int, 96>{});
    if (dims <= 128) return f(e, std::integral_constant<int, 128>{});
    return f(e, std::integral_constant<int, 256>{});
  };
  return dtype == KV_F16 ? with(f16{}) : dtype == KV_BF16 ? with(bf16{}) : with(float{});
}
#endif
