/* Rows (queries) and columns (slots) of an attention matrix: where they are in memory, which columns a row sees, and
 * how logits follow from q.k. For attend, decode and the ops of observing rows (score, peak, error, kl). */
#ifndef KV_ATTENTION_CUH
#define KV_ATTENTION_CUH
#include <type_traits>

#include "grid.cuh"
#include "kvevict.h"
#include "tile.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

/* Divides by n with one multiplication; of(r) is exact for 0 <= r < 2^32 / n. */
struct Divisor {
  int n;
  uint32_t inverse; /* 2^32 / n, rounded up */

  __device__ __forceinline__ int of(int r) const { return n == 1 ? r : (int)((uint64_t)r * inverse >> 32); }
};

KV_DEVICE Divisor divisor(int n) { return {n, 0xffffffffu / n + 1}; }

/* `count` query rows of some heads of a GQA group, in time-major order: row r is query head `head` + r % heads at
 * step `from` + r / heads. */
struct Rows {
  int head, from, count;
  Divisor heads;

  __device__ __forceinline__ int step(int r) const { return from + heads.of(r); }
  __device__ __forceinline__ int head_of(int r) const { return head + r - heads.of(r) * heads.n; }
};

/* Addresses of n query rows in time-major order, as Rows has them. `x` is the address of the first head's row at the
 * first step. */
struct RowsAt {
  uint64_t x;
  int head_stride, step_stride; /* in bytes */
  Divisor heads;
  int n;
};

KV_DEVICE uint64_t row_at(const RowsAt &rows, int r) {
  const int step = rows.heads.of(r);
  return rows.x + (int64_t)(r - step * rows.heads.n) * rows.head_stride + (int64_t)step * rows.step_stride;
}

/* Returns the addresses of `rows` in the array x of E. b: the batch row's offset; head_stride, step_stride: the
 * distances of heads and of steps; all three in elements. */
template <class E>
KV_DEVICE RowsAt rows_at(const Rows &rows, const void *x, int64_t b, int64_t head_stride, int64_t step_stride) {
  const int64_t size = sizeof(E), at = b + rows.head * head_stride + rows.from * step_stride;
  return {(uint64_t)x + at * size, (int)(head_stride * size), (int)(step_stride * size), rows.heads, rows.count};
}

/* Causal bounds of n columns: the row of step t sees columns 0 .. seen(t) - 1. Every row sees at least `least` of
 * them. */
struct Bounds {
  int shift, least, n;

  __device__ __forceinline__ int seen(int t) const { return min(max(shift + t + 1, least), n); }
};

/* Turns s = q.k into a logit in log2 units: scale * of(s), with scale > 0. If q was multiplied by of_query()
 * beforehand, the logit is capped(s). */
struct Logits {
  bool transformed; /* whether logits need of(s); if false, use s in its place */
  float before, cap, scale;

  __device__ __forceinline__ float capped(float x) const { return cap > 0 ? cap * tanhf(x) : x; }
  __device__ __forceinline__ float of(float s) const { return capped(before * s); }
  __device__ __forceinline__ float of_query() const { return transformed ? before : scale; }

  /* Returns the derivative of softcap * tanh(x / softcap) at the x for which capped gives y; 1 without a softcap. */
  __device__ __forceinline__ float cap_grad(float y) const {
    const float share = cap > 0 ? y / cap : 0;
    return 1 - share * share;
  }
};

static inline Logits logits_of(float scale, float softcap) {
  if (softcap > 0) return {true, scale / softcap, softcap * LOG2E, 1};
  if (scale > 0) return {false, 0, 0, scale * LOG2E};
  return {true, scale * LOG2E, 0, 1};
}

/* Replaces each s by logits.of(s), if logits.transformed. */
template <int MT, int NT>
KV_DEVICE void transform(float (&s)[MT][NT][4], const Logits &logits) {
  if (!logits.transformed) return;
  each_number<MT, NT>([&](int m, int n, int half, int j) { s[m][n][2 * half + j] = logits.of(s[m][n][2 * half + j]); });
}

/* Sizes of a tile: WARPS warps with 16 MT query rows each, against KEYS keys. With 32 rows a warp uses each fragment
 * of K and V twice; it has 16 rows where O of 32 rows does not fit the registers. MOST_MT: upper bound of MT. Shared
 * memory holds the rows and two tiles of keys or values, together at most 96 KiB, and then two Columns. */
template <class E, int D, int MOST_MT = 2>
struct RowTile {
  static constexpr bool HALF = sizeof(E) == 2;
  static constexpr int WARPS = !HALF && D == 256 ? 2 : 4, MT = HALF && D < 256 ? MOST_MT : 1, ROWS = WARPS * MT * 16;
  static constexpr int KEYS = HALF && D == 64 ? 128 : !HALF && D == 256 ? 32 : 64, THREADS = WARPS * 32;
  static constexpr int KEY_WARPS = 1;             /* number of warps among which a tile's keys are divided */
  static constexpr int STEPS = KEYS > 64 ? 1 : 8; /* parameter of multiply(): registers hold no more addresses */
  static constexpr size_t TILES = (size_t)(ROWS + 2 * KEYS) * D * sizeof(E), SHARED = TILES + 2 * sizeof(Columns);
};

/* Calls f(E{}, std::integral_constant<int, D>{}), with E the element type of dtype and D the smallest of 64, 96, 128
 * and 256 that is at least `dims`. */
template <class F>
static int dispatch(kv_dtype dtype, int64_t dims, F f) {
  return dispatch(dtype, [&](auto e) {
    if (dims <= 64) return f(e, std::integral_constant<int, 64>{});
    if (dims <= 96) return f(e, std::integral_constant<int, 96>{});
    if (dims <= 128) return f(e, std::integral_constant<int, 128>{});
    return f(e, std::integral_constant<int, 256>{});
  });
}
#endif
