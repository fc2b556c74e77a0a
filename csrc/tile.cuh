/* Tiles of rows in shared memory, their products on tensor cores, and the online softmax, shared by attend and what
 * observes. E is float, f16 or bf16; D is the head dimension rounded up to 64, 96, 128 or 256, the columns added being
 * zero. Sums are fp32, logits in log2 units.
 *
 * Products have the fragment layout of mma (ptx.cuh) for every E, so only multiply and add_values know of tensor cores:
 * lane l holds rows g = l / 4 and g + 8 and columns c = 2 (l % 4) and c + 1 of each 16 x 8 block. fp32 is summed with
 * multiply-adds in the same layout.
 */
#ifndef KV_TILE_CUH
#define KV_TILE_CUH
#include <math.h>

#include <type_traits>

#include "kvevict.h"
#include "launch.cuh"
#include "warp.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <class E>
constexpr int CHUNK = 16 / (int)sizeof(E); /* elements of 16 bytes */

static __device__ __forceinline__ int fragment_row() { return lane_id() / 4; }
static __device__ __forceinline__ int fragment_column() { return lane_id() % 4 * 2; }

/* Where chunk c of row r lies in a tile [rows, D]. Rows 8 i .. 8 i + 7 of a column of chunks lie in different banks, as
 * ldmatrix reads them; a row of 96 16-bit numbers, which is half a turn of the banks off, needs another exchange. */
template <class E, int D>
static __device__ __forceinline__ int tile_at(int r, int c) {
  constexpr int chunks = D / CHUNK<E>;
  return (r * chunks + (c ^ (chunks % 8 ? r / 2 % 4 : r % 8))) * CHUNK<E>;
}

/* Rows r0 .. r0 + ROWS - 1 of `rows` -> tile [ROWS, D], on their way until cp_async_wait. Rows that are not there are 0,
 * and so are columns from dims on. */
template <class E, int D, int ROWS, int THREADS, class Rows>
static __device__ __forceinline__ void tile_load(E *tile, const Rows &rows, int r0, int dims) {
  constexpr int chunks = D / CHUNK<E>;
  constexpr int count = ROWS * chunks / THREADS; /* of each thread */
  static_assert(ROWS * chunks % THREADS == 0, "every thread loads as many chunks");
  /* Where a thread's rows are not evenly spaced their addresses, kept, would take many registers. */
#pragma unroll(THREADS % chunks ? 1 : count)
  for (int i = 0; i < count; i++) {
    const int r = (threadIdx.x + i * THREADS) / chunks, c = (threadIdx.x + i * THREADS) % chunks;
    const void *from = reinterpret_cast<const void *>(rows.at(r0 + r) + c * 16);
    cp_async_16(tile + tile_at<E, D>(r, c), from, r0 + r < (c * CHUNK<E> < dims ? rows.n : 0) ? 16 : 0);
  }
}

/* x [CHUNK] = one chunk */
static __device__ __forceinline__ void chunk_floats(const float *chunk, float (&x)[4]) {
  const float4 y = *reinterpret_cast<const float4 *>(chunk);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
template <class E>
static __device__ __forceinline__ void chunk_floats(const E *chunk, float (&x)[8]) {
  const uint4 y = *reinterpret_cast<const uint4 *>(chunk);
  const uint32_t pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 z = unpack<E>(pairs[i]);
    x[2 * i] = z.x, x[2 * i + 1] = z.y;
  }
}

/* Whether a chunk that this thread loaded into the tile holds inf or NaN. */
template <class E, int D, int ROWS, int THREADS>
static __device__ __forceinline__ bool tile_odd(const E *tile) {
  constexpr int chunks = D / CHUNK<E>;
  bool odd = false;
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * chunks; i += THREADS) {
    float x[CHUNK<E>];
    chunk_floats(tile + tile_at<E, D>(i / chunks, i % chunks), x);
    for (int j = 0; j < CHUNK<E>; j++) odd |= !isfinite(x[j]);
  }
  return odd;
}

enum Pairing { DOT, L1, L2 }; /* of two numbers: x y, |x - y|, (x - y)^2 */

template <int pairing>
static __device__ __forceinline__ float paired(float x, float y, float sum) {
  if (pairing == DOT) return fmaf(x, y, sum);
  return pairing == L1 ? sum + fabsf(x - y) : fmaf(x - y, x - y, sum);
}

/* s [16 MT, 8 NT] = the sum over D of pairs of row `row`.. of a and of row 0.. of b, two tiles. */
template <int pairing, class E, int D, int MT, int NT>
static __device__ __forceinline__ void pair_rows(float (&s)[MT][NT][4], const E *a, int row, const E *b) {
  row += fragment_row();
#pragma unroll
  for (int i = 0; i < MT * NT * 4; i++) s[i / 4 / NT][i / 4 % NT][i % 4] = 0;
#pragma unroll 1
  for (int c = 0; c < D / CHUNK<E>; c++) {
    float x[MT][2][CHUNK<E>], y[CHUNK<E>];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) chunk_floats(a + tile_at<E, D>(row + 8 * i, c), x[i / 2][i % 2]);
#pragma unroll
    for (int n = 0; n < 2 * NT; n++) {
      chunk_floats(b + tile_at<E, D>(n / 2 * 8 + fragment_column() + n % 2, c), y);
#pragma unroll
      for (int i = 0; i < 2 * MT; i++)
#pragma unroll
        for (int j = 0; j < CHUNK<E>; j++) {
          float &sum = s[i / 2][n / 2][i % 2 * 2 + n % 2];
          sum = paired<pairing>(x[i / 2][i % 2][j], y[j], sum);
        }
    }
  }
}

/* s [16 MT, 8 NT] = A B^T, with A from row `row` of a on. */
template <class E, int D, int MT, int NT>
static __device__ __forceinline__ void multiply(float (&s)[MT][NT][4], const E *a, int row, const E *b) {
  if constexpr (sizeof(E) == 4) {
    pair_rows<DOT, E, D>(s, a, row, b);
  } else {
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) s[i / 4 / NT][i / 4 % NT][i % 4] = 0;
#pragma unroll(NT > 8 ? 1 : 2) /* all at once needs more registers than there are */
    for (int k = 0; k < D / 16; k++) {
      uint32_t x[MT][4], y[4];
      /* 16 rows on, chunks are exchanged alike. */
      const E *const at_a = a + tile_at<E, D>(row + lane % 16, k * 2 + lane / 16);
      const E *const at_b = b + tile_at<E, D>(lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2);
#pragma unroll
      for (int m = 0; m < MT; m++) ldmatrix_x4(x[m][0], x[m][1], x[m][2], x[m][3], at_a + m * 16 * D);
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        ldmatrix_x4(y[0], y[1], y[2], y[3], at_b + n * 8 * D);
#pragma unroll
        for (int m = 0; m < MT; m++) mma<E>(s[m][n], x[m], y[0], y[1]), mma<E>(s[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
}

/* o [16 MT, D] += P V, with P [16 MT, 8 NT] rounded to E. */
template <class E, int D, int MT, int NT>
static __device__ __forceinline__ void add_values(float (&o)[MT][D / 8][4], const float (&p)[MT][NT][4], const E *v) {
  const int lane = lane_id();
#pragma unroll
  for (int k = 0; k < NT / 2; k++) {
    uint32_t x[MT][4], y[4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) x[m][i] = pack<E>(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      ldmatrix_x4_trans(y[0], y[1], y[2], y[3], v + tile_at<E, D>(lane % 16, d + lane / 16) + k * 16 * D);
#pragma unroll
      for (int m = 0; m < MT; m++) mma<E>(o[m][d], x[m], y[0], y[1]), mma<E>(o[m][d + 1], x[m], y[2], y[3]);
    }
  }
}

/* Row r's columns d and d + 1; d is even. */
template <class E, int D>
static __device__ __forceinline__ float2 pair_at(const E *tile, int r, int d) {
  const E *x = tile + tile_at<E, D>(r, d / CHUNK<E>) + d % CHUNK<E>;
  if constexpr (sizeof(E) == 4)
    return *reinterpret_cast<const float2 *>(x);
  else
    return unpack<E>(*reinterpret_cast<const uint32_t *>(x));
}

/* o += P V with multiply-adds, over only the first seen[m][.] columns of each row. */
template <int D, int MT, int NT>
static __device__ __forceinline__ void add_values_seen(float (&o)[MT][D / 8][4], const float (&p)[MT][NT][4],
                                                       const float *v, const int (&seen)[MT][2]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll 1
    for (int c = 0; c < 8; c += 2)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int column = n * 8 + c + j, owner = (lane_id() & ~3) + c / 2;
        float x[MT][2];
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) x[i / 2][i % 2] = __shfl_sync(ALL_LANES, p[i / 2][n][i % 2 * 2 + j], owner);
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
          const float2 y = pair_at<float, D>(v, column, d * 8 + fragment_column());
#pragma unroll
          for (int i = 0; i < 2 * MT; i++)
            if (column < seen[i / 2][i % 2]) {
              float *to = o[i / 2][d] + i % 2 * 2;
              to[0] = fmaf(x[i / 2][i % 2], y.x, to[0]), to[1] = fmaf(x[i / 2][i % 2], y.y, to[1]);
            }
        }
      }
}

static __device__ __forceinline__ float odd_or_zero(float x) { return isfinite(x) ? 0 : x; }

/* Moves inf and NaN from the tile v [ROWS, D] into the rows of o that see them: a product would bring them to all rows.
 * Called by all threads of the block. */
template <class E, int D, int ROWS, int THREADS, int MT>
static __device__ __forceinline__ void move_odd(float (&o)[MT][D / 8][4], E *v, const int (&seen)[MT][2]) {
#pragma unroll 1
  for (int c = 0; c < ROWS; c++)
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      const float2 y = pair_at<E, D>(v, c, d * 8 + fragment_column());
#pragma unroll
      for (int i = 0; i < 2 * MT; i++)
        if (c < seen[i / 2][i % 2]) {
          float *to = o[i / 2][d] + i % 2 * 2;
          to[0] += odd_or_zero(y.x), to[1] += odd_or_zero(y.y);
        }
    }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * D; i += THREADS)
    if (!isfinite(to_float(v[i]))) v[i] = E{};
  __syncthreads();
}

/* WARPS warps of 16 MT query rows each against KEYS keys. 32 rows a warp use each fragment of K and V twice; where their
 * O does not fit the registers it is 16. In shared memory are the rows and two tiles of keys or values: at most 96 KiB. */
template <class E, int D>
struct RowTile {
  static constexpr bool HALF = sizeof(E) == 2;
  static constexpr int WARPS = !HALF && D == 256 ? 2 : 4, MT = HALF && D < 256 ? 2 : 1, ROWS = WARPS * MT * 16;
  static constexpr int KEYS = HALF && D == 64 ? 128 : !HALF && D == 256 ? 32 : 64, THREADS = WARPS * 32;
  static constexpr size_t SHARED = (size_t)(ROWS + 2 * KEYS) * D * sizeof(E);
};

/* How the logits come from s = q.k. In log2 units they are scale * of(s), with scale > 0. */
struct Logits {
  bool bent; /* of(s) is not s itself */
  float before, cap, scale;

  __device__ __forceinline__ float of(float s) const {
    return cap > 0 ? cap * tanhf(before * s) : before * s;
  }
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

/* -inf from column seen[m][.] on. */
template <int MT, int NT>
static __device__ __forceinline__ void mask(float (&s)[MT][NT][4], const int (&seen)[MT][2]) {
#pragma unroll
  for (int i = 0; i < MT * NT * 4; i++) {
    const int m = i / 4 / NT, n = i / 4 % NT, column = n * 8 + fragment_column() + i % 2;
    if (column >= seen[m][i % 4 / 2]) s[m][n][i % 4] = -INFINITY;
  }
}

/* One step of the rows' online softmax: s -> p = 2^(scale s - top), with top the maximum so far, sum this lane's part of
 * the sum of p, alpha what earlier p are to be scaled by. While a row has seen nothing top is -inf; 0 stands in for it. */
template <int MT, int NT>
static __device__ __forceinline__ void softmax_step(float (&s)[MT][NT][4], float scale, float (&top)[MT][2],
                                                    float (&sum)[MT][2], float (&alpha)[MT][2]) {
#pragma unroll
  for (int i = 0; i < 2 * MT; i++) {
    const int m = i / 2, h = i % 2;
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < NT; n++) most = fmaxf(most, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
    most = fmaxf(top[m][h], lanes_max<4>(most) * scale);
    const float at = most == -INFINITY ? 0 : most;
    alpha[m][h] = exp2_approx(top[m][h] - at);
    top[m][h] = most;
    float more = 0;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 2 * h; j < 2 * h + 2; j++) more += s[m][n][j] = exp2_approx(fmaf(s[m][n][j], scale, -at));
    sum[m][h] = sum[m][h] * alpha[m][h] + more;
  }
}

/* The alive columns [stored | new] of one (b, kv head), as addresses: those of columns that are not there are never
 * read, but computed. */
struct Columns {
  uint64_t stored, fresh;           /* where column 0 of either would be */
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
  return {(uint64_t)stored + offset * dims * size,
          (uint64_t)fresh + at * size,
          dims * (int)size,
          (int)(stride[2] * size),
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

/* Where they are in x, by strides of b, head and step. */
struct RowsAt {
  uint64_t x;
  int64_t head_stride, step_stride; /* in bytes */
  Rows rows;
  int n;

  __device__ __forceinline__ uint64_t at(int r) const {
    return x + rows.head_of(r) * head_stride + rows.step(r) * step_stride;
  }
};

template <class E>
static __device__ __forceinline__ RowsAt rows_at(const Rows &rows, const void *x, int64_t b, int64_t head_stride,
                                                 int64_t step_stride) {
  const int64_t size = sizeof(E);
  return {(uint64_t)x + b * size, head_stride * size, step_stride * size, rows, rows.count};
}

/* Step t sees the columns 0 .. clamp(shift + t + 1, least, n) - 1. */
struct Sight {
  int shift, least, n;

  __device__ __forceinline__ int seen(int t) const { return min(max(shift + t + 1, least), n); }
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
