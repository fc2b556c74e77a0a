/* Tiles of rows in shared memory, their products on tensor cores, and the online softmax, for attend, decode and the
 * ops of observing rows. E is float, f16 or bf16; D is the head dimension rounded up to 64, 96, 128 or 256, padded
 * with zeros. Sums are fp32, logits in log2 units.
 *
 * Products of every E have the fragment layout of mma (ptx.cuh): lane l holds rows g = l / 4 and g + 8 and columns c
 * = 2 (l % 4) and c + 1 of each 16 x 8 block. Only multiply and add_values use tensor cores, for f16 and bf16; float
 * is summed with multiply-adds in the same layout. */
#ifndef KV_TILE_CUH
#define KV_TILE_CUH
#include <math.h>

#include "columns.cuh"
#include "launch.cuh"

KV_DEVICE int fragment_row() { return lane_id() / 4; }
KV_DEVICE int fragment_column() { return lane_id() % 4 * 2; }

/* Returns the index of the first element of vector c of row r in a tile [rows, D]. The swizzle puts vector c of rows
 * 8 i .. 8 i + 7, which ldmatrix reads together, into different banks. A row of 96 16-bit numbers is 1.5 times as
 * long as all banks together and needs another swizzle. */
template <class E, int D>
KV_DEVICE int tile_at(int r, int c) {
  constexpr int vectors = D / VECTOR<E>;
  return (r * vectors + (c ^ (vectors % 8 ? r / 2 % 4 : r % 8))) * VECTOR<E>;
}

KV_DEVICE uint64_t row_at(const kv_segments &rows, int r) { return kv_segments_at(&rows, r); }

/* Consecutive rows that may be evenly spaced in memory; x: address of the first row; step: bytes from row to row. */
struct Even {
  bool all; /* whether the rows are evenly spaced; if not, do not use x and step */
  uint64_t x;
  uint32_t step;
};

/* Returns whether and how rows r0 .. r0 + count - 1 are evenly spaced. They are if all of them are stored or all are
 * new, as in most tiles of keys and values. */
KV_DEVICE Even even(const kv_segments &rows, int r0, int count) {
  const bool stored = r0 + count <= rows.len;
  return {stored || (r0 >= rows.len && r0 + count <= rows.n), row_at(rows, r0),
          (uint32_t)(stored ? rows.stored_stride : rows.chunk_stride)};
}
template <class Rows>
KV_DEVICE Even even(const Rows &, int, int) {
  return {false, 0, 0};
}

/* Starts copying rows r0 .. r0 + ROWS - 1 of `rows`, at the addresses that row_at gives, into tile [ROWS, D].
 * cp_async_wait waits for the copies. Rows past the last one and elements from dims on become 0. The tile's rows
 * before `from_row` stay as they are. */
template <class E, int D, int ROWS, int THREADS, class Rows>
KV_DEVICE void tile_load(E *tile, const Rows &rows, int r0, int dims, int from_row = 0) {
  constexpr int vectors = D / VECTOR<E>;
  constexpr int count = ROWS * vectors / THREADS; /* vectors that a thread copies */
  static_assert(ROWS * vectors % THREADS == 0, "every thread must load equally many vectors");
  /* lanes: threads that share a row; apart: distance of a thread's rows. A multiple of 8, it gives all of them one
   * place in the swizzle. */
  constexpr int lanes = vectors % 8 ? 4 : vectors, apart = THREADS / lanes;
  if constexpr (THREADS % lanes == 0 && apart % 8 == 0 && ROWS % apart == 0) {
    const Even run = even(rows, r0, ROWS);
    if (run.all && dims == D && from_row <= 0) {
      const int r = threadIdx.x / lanes, c = threadIdx.x % lanes;
      E *const to = tile + tile_at<E, D>(r, c);
      uint64_t from = run.x + (uint64_t)r * run.step + c * 16;
#pragma unroll
      for (int i = 0; i < ROWS; i += apart, from += (uint64_t)apart * run.step)
#pragma unroll
        for (int j = 0; j < vectors; j += lanes)
          cp_async_16(to + i * D + j * VECTOR<E>, reinterpret_cast<const void *>(from + j * 16), 16);
      return;
    }
  }
  /* The loop is unrolled where a thread's rows are evenly spaced; else their addresses would take too many
   * registers. It is never unrolled for fp32 of 256 dimensions (64 vectors), where no registers are left. */
#pragma unroll(THREADS % vectors || vectors == 64 ? 1 : 4)
  for (int i = 0; i < count; i++) {
    const int r = (threadIdx.x + i * THREADS) / vectors, c = (threadIdx.x + i * THREADS) % vectors;
    if (r < from_row) continue;
    const void *from = reinterpret_cast<const void *>(row_at(rows, r0 + r) + c * 16);
    cp_async_16(tile + tile_at<E, D>(r, c), from, r0 + r < (c * VECTOR<E> < dims ? rows.n : 0) ? 16 : 0);
  }
}

template <class E>
KV_DEVICE uint4 vector_of(const float (&x)[VECTOR<E>]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    if constexpr (sizeof(E) == 4)
      word[i] = __float_as_uint(x[i]);
    else
      word[i] = pack<E>(x[2 * i], x[2 * i + 1]);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

/* A row that is unpacked into a tile is shared by TILE_LANES lanes with TILE_VECTORS vectors each. */
template <class E, int D>
constexpr int TILE_VECTORS = D / VECTOR<E> > 32 ? 2 : 1;
template <class E, int D>
constexpr int TILE_LANES = (D == 96 ? 128 : D) / VECTOR<E> / TILE_VECTORS<E, D>;

/* Unpacks columns c0 .. c0 + ROWS - 1, as far as they are packed, into the tile, rounded to E. Other threads may
 * read the rows after a barrier. */
template <class E, int D, int ROWS, int THREADS>
KV_DEVICE void tile_unpack(E *tile, const Columns x, int c0, int dims) {
  constexpr int L = TILE_LANES<E, D>, V = TILE_VECTORS<E, D>, vectors = D / VECTOR<E>;
  const int packed = min(x.packed() - c0, ROWS), lane = threadIdx.x % L;
#pragma unroll 1
  for (int base = 0; base < packed; base += THREADS / L) {
    const int r = base + threadIdx.x / L;
    float y[V][VECTOR<E>];
    packed_column<E, L, V>(x, c0 + r, r < packed, dims, y);
#pragma unroll
    for (int v = 0; v < V; v++)
      if (r < packed && v * L + lane < vectors)
        *reinterpret_cast<uint4 *>(tile + tile_at<E, D>(r, v * L + lane)) = vector_of<E>(y[v]);
  }
}

/* Starts copying columns c0 .. c0 + ROWS - 1, as far as they are not packed, into the tile. If stored slots are
 * packed, these are the new ones. */
template <class E, int D, int ROWS, int THREADS>
KV_DEVICE void tile_copy(E *tile, const Columns x, int c0, int dims) {
  kv_segments at = x.at;
  if (x.kind != KV_AS_COMPUTED) at.len = 0; /* gives every column, also past the last, the address of an unpacked row */
  tile_load<E, D, ROWS, THREADS>(tile, at, c0, dims, x.packed() - c0);
}

template <class E, int D, int ROWS, int THREADS>
KV_DEVICE void tile_load(E *tile, const Columns &x, int c0, int dims) {
  tile_unpack<E, D, ROWS, THREADS>(tile, x, c0, dims);
  tile_copy<E, D, ROWS, THREADS>(tile, x, c0, dims);
}

/* x [VECTOR] = the numbers of one vector of a tile, as floats. */
template <class E>
KV_DEVICE void tile_floats(const E *vector, float (&x)[VECTOR<E>]) {
  vector_floats<E>(*reinterpret_cast<const uint4 *>(vector), x);
}

/* Returns whether all numbers that this thread loaded into the tile are finite. */
template <class E, int D, int ROWS, int THREADS>
KV_DEVICE bool tile_finite(const E *tile) {
  constexpr int vectors = D / VECTOR<E>;
  bool finite = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * vectors; i += THREADS) {
    float x[VECTOR<E>];
    tile_floats(tile + tile_at<E, D>(i / vectors, i % vectors), x);
    for (int j = 0; j < VECTOR<E>; j++) finite &= isfinite(x[j]) != 0;
  }
  return finite;
}

/* Calls f(m, n, half, j) for each number s[m][n][2 half + j] that a lane holds of MT x NT fragments of 16 x 8. It is
 * in row 16 m + 8 half + fragment_row() and column 8 n + fragment_column() + j. */
template <int MT, int NT, class F>
KV_DEVICE void each_number(F f) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < 2; j++) f(m, n, half, j);
}

/* Calls f(m, half) for each row of which a lane holds numbers: row 16 m + 8 half + fragment_row(). */
template <int MT, class F>
KV_DEVICE void each_row(F f) {
  unrolled<MT, 2>(f);
}

template <int MT, int NT>
KV_DEVICE void zero(float (&s)[MT][NT][4]) {
  each_number<MT, NT>([&](int m, int n, int half, int j) { s[m][n][2 * half + j] = 0; });
}

enum Pairing { DOT, L1, L2 }; /* what pair_rows sums over pairs of numbers: x y, |x - y|, (x - y)^2 */

template <int pairing>
KV_DEVICE float paired(float x, float y, float sum) {
  if (pairing == DOT) return fmaf(x, y, sum);
  return pairing == L1 ? sum + fabsf(x - y) : fmaf(x - y, x - y, sum);
}

/* s [16 MT, 8 NT] = the sum over D of x y, |x - y| or (x - y)^2, for each row x of tile a from `row` on and each row
 * y of tile b. */
template <int pairing, class E, int D, int MT, int NT>
KV_DEVICE void pair_rows(float (&s)[MT][NT][4], const E *a, int row, const E *b) {
  row += fragment_row();
  zero(s);
#pragma unroll 1
  for (int c = 0; c < D / VECTOR<E>; c++) {
    float x[MT][2][VECTOR<E>], y[VECTOR<E>];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) tile_floats(a + tile_at<E, D>(row + 16 * m + 8 * half, c), x[m][half]);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        tile_floats(b + tile_at<E, D>(8 * n + fragment_column() + j, c), y);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < VECTOR<E>; i++)
              s[m][n][2 * half + j] = paired<pairing>(x[m][half][i], y[i], s[m][n][2 * half + j]);
      }
  }
}

/* s [16 MT, 8 NT] = A B^T, where A is 16 MT rows of tile a from `row` on and B is tile b. The loop along D is
 * unrolled STEPS times; registers must hold the addresses of STEPS steps. */
template <class E, int D, int STEPS, int MT, int NT>
KV_DEVICE void multiply(float (&s)[MT][NT][4], const E *a, int row, const E *b) {
  if constexpr (sizeof(E) == 4) {
    pair_rows<DOT, E, D>(s, a, row, b);
  } else {
    const int lane = lane_id();
    constexpr int period = D / VECTOR<E> % 8 ? 4 : 8; /* the swizzle's period in vectors; in rows it is 16 */
    zero(s);
#pragma unroll(STEPS)
    for (int k = 0; k < D / 16; k++) {
      uint32_t x[MT][4], y[4];
      const int c = 2 * k % period, on = (2 * k - c) * VECTOR<E>;
      const E *const at_a = a + tile_at<E, D>(row + lane % 16, c + lane / 16) + on;
      const E *const at_b = b + tile_at<E, D>(lane / 16 * 8 + lane % 8, c + lane / 8 % 2) + on;
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

/* o [16 MT, D] += P V, with P [16 MT, 8 NT] rounded to E. EXACT also adds the remainders of this rounding times V,
 * so that P counts nearly as fp32; an inf in V then gives NaN. */
template <class E, int D, bool EXACT = false, int MT, int NT>
KV_DEVICE void add_values(float (&o)[MT][D / 8][4], const float (&p)[MT][NT][4], const E *v) {
  const int lane = lane_id();
#pragma unroll
  for (int k = 0; k < NT / 2; k++) {
    uint32_t x[MT][4], rest[MT][4], y[4];
#pragma unroll
    for (int m = 0; m < MT; m++)
      unrolled<2, 2>([&](int right, int half) {
        const float *const from = p[m][2 * k + right] + 2 * half;
        x[m][2 * right + half] = pack<E>(from[0], from[1]);
        if constexpr (EXACT) {
          const float2 kept = unpack<E>(x[m][2 * right + half]);
          rest[m][2 * right + half] = pack<E>(from[0] - kept.x, from[1] - kept.y);
        }
      });
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      ldmatrix_x4_trans(y[0], y[1], y[2], y[3], v + tile_at<E, D>(lane % 16, d + lane / 16) + k * 16 * D);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma<E>(o[m][d], x[m], y[0], y[1]), mma<E>(o[m][d + 1], x[m], y[2], y[3]);
        if constexpr (EXACT) mma<E>(o[m][d], rest[m], y[0], y[1]), mma<E>(o[m][d + 1], rest[m], y[2], y[3]);
      }
    }
  }
}

/* Returns elements d and d + 1 of row r of a tile, as floats; d is even. */
template <class E, int D>
KV_DEVICE float2 pair_at(const E *tile, int r, int d) {
  const E *x = tile + tile_at<E, D>(r, d / VECTOR<E>) + d % VECTOR<E>;
  if constexpr (sizeof(E) == 4)
    return *reinterpret_cast<const float2 *>(x);
  else
    return unpack<E>(*reinterpret_cast<const uint32_t *>(x));
}

/* o += P V in fp32 with multiply-adds; each row adds only the first seen[m][half] columns. */
template <int D, int MT, int NT>
KV_DEVICE void add_values_seen(float (&o)[MT][D / 8][4], const float (&p)[MT][NT][4], const float *v,
                               const int (&seen)[MT][2]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll 1
    for (int c = 0; c < 8; c += 2)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int column = n * 8 + c + j, owner = (lane_id() & ~3) + c / 2;
        float x[MT][2];
        each_row<MT>([&](int m, int half) { x[m][half] = __shfl_sync(ALL_LANES, p[m][n][2 * half + j], owner); });
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
          const float2 y = pair_at<float, D>(v, column, d * 8 + fragment_column());
          each_row<MT>([&](int m, int half) {
            if (column >= seen[m][half]) return;
            float *const to = o[m][d] + 2 * half;
            to[0] = fmaf(x[m][half], y.x, to[0]), to[1] = fmaf(x[m][half], y.y, to[1]);
          });
        }
      }
}

KV_DEVICE float zero_if_finite(float x) { return isfinite(x) ? 0 : x; }

/* Adds each inf and NaN of the tile v [ROWS, D] to those rows of o that see its slot; a row sees the first
 * seen[m][half] slots. A matrix product would spread inf and NaN to all rows. */
template <class E, int D, int ROWS, int MT>
KV_DEVICE void add_nonfinite(float (&o)[MT][D / 8][4], const E *v, const int (&seen)[MT][2]) {
#pragma unroll 1
  for (int c = 0; c < ROWS; c++)
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      const float2 y = pair_at<E, D>(v, c, d * 8 + fragment_column());
      each_row<MT>([&](int m, int half) {
        if (c >= seen[m][half]) return;
        o[m][d][2 * half] += zero_if_finite(y.x), o[m][d][2 * half + 1] += zero_if_finite(y.y);
      });
    }
}

/* Replaces each inf and NaN of tile v [ROWS, D] by 0, after all threads of the block have read the tile. */
template <class E, int D, int ROWS, int THREADS>
KV_DEVICE void clear_nonfinite(E *v) {
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * D; i += THREADS)
    if (!isfinite(to_float(v[i]))) v[i] = E{};
  __syncthreads();
}

/* Makes s -inf in the columns that a row does not see: those from seen[m][half] on. */
template <int MT, int NT>
KV_DEVICE void mask(float (&s)[MT][NT][4], const int (&seen)[MT][2]) {
  each_number<MT, NT>([&](int m, int n, int half, int j) {
    if (n * 8 + fragment_column() + j >= seen[m][half]) s[m][n][2 * half + j] = -INFINITY;
  });
}

/* Does one step of the rows' online softmax. Replaces s by p = 2^(scale s - top), with top the row's maximum of
 * scale s so far, adds this lane's part of p to sum, and sets alpha to the factor of all earlier p. Where top is
 * -inf, since no key was seen, 0 is used in its place. */
template <int MT, int NT>
KV_DEVICE void softmax_step(float (&s)[MT][NT][4], float scale, float (&top)[MT][2], float (&sum)[MT][2],
                            float (&alpha)[MT][2]) {
  each_row<MT>([&](int m, int half) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < NT; n++) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
    most = fmaxf(top[m][half], lanes_max<4>(most) * scale);
    const float at = most == -INFINITY ? 0 : most;
    alpha[m][half] = exp2_approx(top[m][half] - at);
    top[m][half] = most;
    float more = 0;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float &x = s[m][n][2 * half + j];
        more += x = exp2_approx(fmaf(x, scale, -at));
      }
    sum[m][half] = sum[m][half] * alpha[m][half] + more;
  });
}

#endif
