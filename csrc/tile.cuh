/* Tiles of rows in shared memory, their products on tensor cores, and the online softmax, for attend and what observes.
 * E is float, f16 or bf16; D is the head dimension rounded up to 64, 96, 128 or 256, the columns added being zero. Sums
 * are fp32, logits in log2 units.
 *
 * Products have the fragment layout of mma (ptx.cuh) for every E, so only multiply and add_values know of tensor cores:
 * lane l holds rows g = l / 4 and g + 8 and columns c = 2 (l % 4) and c + 1 of each 16 x 8 block. fp32 is summed with
 * multiply-adds in the same layout.
 */
#ifndef KV_TILE_CUH
#define KV_TILE_CUH
#include <math.h>

#include "launch.cuh"
#include "warp.cuh"

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

/* s [16 MT, 8 NT] = A B^T, with A from row `row` of a on. The addresses of STEPS steps along D are in registers at once. */
template <class E, int D, int STEPS, int MT, int NT>
static __device__ __forceinline__ void multiply(float (&s)[MT][NT][4], const E *a, int row, const E *b) {
  if constexpr (sizeof(E) == 4) {
    pair_rows<DOT, E, D>(s, a, row, b);
  } else {
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) s[i / 4 / NT][i / 4 % NT][i % 4] = 0;
#pragma unroll(STEPS)
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

#endif
