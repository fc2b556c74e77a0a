/* Few rows on many slots: the slots of a head are cut into splits that depend only on their number and the shapes, each
 * split leaves its part of the rows' softmax in scratch, and the parts are combined in order: the same bits every time.
 * Shared by attend and decode. */
#ifndef KV_STREAM_CUH
#define KV_STREAM_CUH
#include "attention.cuh"

constexpr int MOST_SPLITS = 64; /* of a tile of rows: a warp combines as many in two steps */

/* Slots of a split, a multiple of STEP as `least` is, given how many slots and at most how many splits there are. */
template <int STEP>
static __device__ __forceinline__ int split_size(int n, int splits, int least = 2 * STEP) {
  const int fair = (n + splits - 1) / splits;
  return max(least, (fair + STEP - 1) / STEP * STEP);
}

/* Cuts scratch into arrays; with NULL it only counts the bytes. */
struct Cutter {
  void *memory;
  int64_t bytes;

  template <class T>
  T *take(int64_t n) {
    T *const mine = reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(memory) + (uintptr_t)bytes);
    bytes += (n * (int64_t)sizeof(T) + 255) / 256 * 256;
    return mine;
  }
};

/* Parts of softmaxes. The G * T rows of a head, in time-major order, are `tiles` tiles of `rows`. */
struct Parts {
  int splits, tiles, rows; /* splits: of a tile, at most */
  uint32_t *count;         /* [heads, tiles] a tile's splits */
  float *o;                /* [heads, tiles, splits, rows, D] the values' sum, weighted by 2^(logit - maximum) */
  float2 *ml;              /* [heads, tiles, splits, rows] the maximum, and the weights' sum */
};

/* all: the rows of a head; rows: those of a tile. */
static Parts parts_of(Cutter &scratch, int64_t heads, int64_t all, int64_t rows, int64_t splits, int64_t D) {
  Parts x = {(int)splits, (int)((all + rows - 1) / rows), (int)(all < rows ? all : rows), nullptr, nullptr, nullptr};
  const int64_t tiles = heads * x.tiles, parts = tiles * splits * x.rows;
  x.count = scratch.take<uint32_t>(tiles);
  x.o = scratch.take<float>(parts * D);
  x.ml = scratch.take<float2>(parts);
  return x;
}

/* Merges the parts that groups of threads have of each row: ml [rows, groups] and part [rows, groups, D], in shared
 * memory, to ml_out [rows] and o_out [rows, D]. */
static __device__ __forceinline__ void merge_parts(int groups, const float2 *ml, const float *part, int rows, int D,
                                                   float *o_out, float2 *ml_out) {
  __syncthreads(); /* the parts are there */
  for (int at = threadIdx.x; at < rows * D; at += blockDim.x) {
    const int r = at / D, d = at % D;
    float top = -INFINITY, sum = 0, length = 0;
    for (int j = 0; j < groups; j++) top = fmaxf(top, ml[r * groups + j].x);
    for (int j = 0; j < groups; j++) {
      const float weight = exp2_approx(ml[r * groups + j].x - (top == -INFINITY ? 0 : top));
      sum += weight * part[(r * groups + j) * D + d];
      length += weight * ml[r * groups + j].y;
    }
    o_out[at] = sum;
    if (d == 0) ml_out[r] = make_float2(top, length);
  }
}

/* out and lse of one row from its splits, by one warp. part: the first split's o; splits are `step` floats apart.
 * rotated: o is as of values of 4 bits. */
template <class E>
static __device__ void finish(const float *part, int step, const float2 *ml, int ml_step, int splits, int D, float sink,
                              E *out, float *lse, bool rotated = false) {
  constexpr int AHEAD = 16; /* splits that are loaded at once; those past the last have weight 0 */
  const int lane = lane_id();
  float4 x[AHEAD];
  const auto load = [&](int i0, int d) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      x[i] = i0 + i < splits && d < D ? *reinterpret_cast<const float4 *>(part + (i0 + i) * step + d)
                                      : make_float4(0, 0, 0, 0);
  };
  load(0, 4 * lane); /* not after the weights */
  float2 mine[2];
  float weight[2], top = sink, sum = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    mine[i] = lane + 32 * i < splits ? ml[(lane + 32 * i) * ml_step] : make_float2(-INFINITY, 0);
    top = fmaxf(top, mine[i].x);
  }
  top = lanes_max(top);
  const float from = top == -INFINITY ? 0 : top;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    weight[i] = exp2_approx(mine[i].x - from);
    sum += weight[i] * mine[i].y;
  }
  const float l = exp2_approx(sink - from) + lanes_sum(sum);
  if (lane == 0) *lse = LN2 * (top + log2f(l));
  float o[KV_MOST_D_CUDA / 128][4] = {};
#pragma unroll
  for (int v = 0; v < KV_MOST_D_CUDA / 128; v++) {
    if (128 * v >= D) break;
    for (int i0 = 0; i0 < splits; i0 += AHEAD) {
      if (v > 0 || i0 > 0) load(i0, 128 * v + 4 * lane);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const float w = __shfl_sync(ALL_LANES, i0 < 32 ? weight[0] : weight[1], i0 % 32 + i);
        o[v][0] += w * x[i].x, o[v][1] += w * x[i].y, o[v][2] += w * x[i].z, o[v][3] += w * x[i].w;
      }
    }
  }
  if (rotated) hadamard<4, 32, KV_MOST_D_CUDA / 128>(o, D);
  const float over = l == 0 ? 0 : 1 / l;
#pragma unroll
  for (int v = 0; v < KV_MOST_D_CUDA / 128; v++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int d = 128 * v + 4 * lane + i;
      if (d < D) out[d] = from_float<E>(o[v][i] * over);
    }
}

/* The results of attend and decode; T is 1 for decode. */
struct Outputs {
  int64_t B, H, Hkv, T, D;
  const float *sinks; /* [H] or NULL */
  void *out;          /* [B, T, H, D] */
  float *lse;         /* [B, H, T] */
  bool rotated;       /* the parts are as of values of 4 bits */
};

constexpr int COMBINE_WARPS = 4;

/* A warp combines the parts of one row; none where a tile's count is 0. */
template <class E>
static __global__ void __launch_bounds__(COMBINE_WARPS * 32) combine_kernel(const Parts x, const Outputs y) {
  const int kv_head = block_head(), G = (int)y.H / (int)y.Hkv, r = blockIdx.x * COMBINE_WARPS + warp_id();
  await_kernels_before();
  if (kv_head >= y.B * y.Hkv || r >= y.T * G) return;
  const int64_t b = kv_head / (int)y.Hkv, t = r / G, head = kv_head % (int)y.Hkv * G + r % G;
  const int64_t tile = (int64_t)kv_head * x.tiles + r / x.rows, at = tile * x.splits * x.rows + r % x.rows;
  const int splits = (int)x.count[tile];
  if (splits == 0) return;
  const float sink = y.sinks ? y.sinks[head] * LOG2E : -INFINITY;
  finish<E>(x.o + at * y.D, x.rows * (int)y.D, x.ml + at, x.rows, splits, (int)y.D, sink,
            static_cast<E *>(y.out) + ((b * y.T + t) * y.H + head) * y.D, y.lse + (b * y.H + head) * y.T + t,
            y.rotated);
}

template <class E>
static int combine(const Parts &x, const Outputs &y, void *stream) {
  const dim3 grid = grid_of((y.T * (y.H / y.Hkv) + COMBINE_WARPS - 1) / COMBINE_WARPS, y.B * y.Hkv);
  return launch_early<combine_kernel<E>>(grid, COMBINE_WARPS * 32, 0, stream, x, y);
}

/* 16 query rows, the same in all warps, against KEYS keys, shared out among the warps: reading takes longer than
 * the products of so few rows. Its members are those of RowTile. */
template <class E, int D>
struct NarrowTile {
  static constexpr int WARPS = 4, KEY_WARPS = WARPS, MT = 1, ROWS = 16, THREADS = WARPS * 32;
  static constexpr int KEYS = sizeof(E) == 4 && D == 256 ? 32 : 64, STEPS = 4;
  static constexpr size_t TILES = (size_t)(ROWS + 2 * KEYS) * D * sizeof(E), SHARED = TILES + 2 * sizeof(Columns);
};

/* For up to 64 rows: several such blocks fit a multiprocessor. */
template <class E, int D>
using MediumTile = RowTile<E, D, 1>;

/* A warp's place in a tile X: its first row and first key. */
template <class X>
static __device__ __forceinline__ int warp_row() {
  return warp_id() / X::KEY_WARPS * X::MT * 16;
}
template <class X>
static __device__ __forceinline__ int warp_key() {
  return X::KEY_WARPS == 1 ? 0 : warp_id() * (X::KEYS / X::KEY_WARPS);
}

/* Columns c0 .. c1 - 1 alone, as 0 .. c1 - c0 - 1; of stored rows, too, no more than these (at.len <= at.n). */
static __device__ __forceinline__ Columns between(Columns x, int c0, int c1) {
  const kv_unsigned from = (kv_unsigned)c0;
  x.at.stored += (uint64_t)from * (kv_unsigned)x.at.stored_stride;
  x.at.chunk += (uint64_t)from * (kv_unsigned)x.at.chunk_stride;
  x.at.n = c1 - c0, x.at.len = min(x.at.len - c0, x.at.n);
  return x;
}

/* The results of a warp's rows over the columns so far; sum: each lane's share. */
template <int MT, int D>
struct Attended {
  float o[MT][D / 8][4], top[MT][2], sum[MT][2];
};

/* Rows r0 .. r0 + ROWS - 1 of `rows` against all columns: keys.at.n, and as many values. Columns before `fewest` are
 * seen by every row; seen_by(m, half): how many columns a row sees; look(s, c): s [16 MT, 8 NT] are the warp's logits,
 * before their scale, of the columns from c on; EXACT: as of add_values. The tiles lie in shared memory in the order
 * q, k, v; it is free again afterwards; keys and values follow, as registers are scarce. */
template <class E, int D, class X, bool EXACT, class From, class Seen, class Look>
static __device__ __forceinline__ void attend_columns(Attended<X::MT, D> &x, E *q, const From &rows, int r0,
                                                      const Columns &keys, const Columns &values, int fewest, int dims,
                                                      const Logits &logits, Seen seen_by, Look look) {
  constexpr int MT = X::MT, NT = X::KEYS / X::KEY_WARPS / 8, LOADERS = X::ROWS < 32 ? 64 : X::THREADS;
  E *const k = q + X::ROWS * D, *const v = k + X::KEYS * D;
  Columns *const kept = reinterpret_cast<Columns *>(v + X::KEYS * D);
  if (threadIdx.x == 0) kept[0] = keys, kept[1] = values;
  const int n = keys.at.n, key = warp_key<X>();
  each_row<MT>([&](int m, int half) { x.top[m][half] = -INFINITY, x.sum[m][half] = 0; });
  zero(x.o);
  if (LOADERS == X::THREADS || threadIdx.x < LOADERS) tile_load<E, D, X::ROWS, LOADERS>(q, rows, r0, dims);
  tile_copy<E, D, X::KEYS, X::THREADS>(k, keys, 0, dims);
  cp_async_commit();
  __syncthreads(); /* kept is there */
#pragma unroll 1
  for (int c0 = 0; c0 < n; c0 += X::KEYS) {
    const bool masked = c0 + X::KEYS > fewest;
    tile_unpack<E, D, X::KEYS, X::THREADS>(k, kept[0], c0, dims); /* not with the copies: registers are free here */
    cp_async_wait<0>();
    __syncthreads(); /* K is there; V of the tile before has been read */
    tile_load<E, D, X::KEYS, X::THREADS>(v, kept[1], c0, dims);
    cp_async_commit();
    float s[MT][NT][4], alpha[MT][2];
    multiply<E, D, X::STEPS>(s, q, warp_row<X>(), k + key * D);
    cp_async_wait<0>();
    if (D % 64 && kept[1].packed() > c0) __syncthreads(); /* others wrote the rows that tile_finite reads */
    /* V is there; K has been read */
    const bool finite = __syncthreads_and(sizeof(E) == 4 || !masked || tile_finite<E, D, X::KEYS, X::THREADS>(v));
    tile_copy<E, D, X::KEYS, X::THREADS>(k, kept[0], c0 + X::KEYS, dims);
    cp_async_commit();
    int seen[MT][2]; /* read just before use: registers are scarce */
    const auto read_seen = [&] { each_row<MT>([&](int m, int half) { seen[m][half] = seen_by(m, half) - c0 - key; }); };
    transform(s, logits);
    look(s, c0 + key);
    if (masked) read_seen(), mask(s, seen);
    softmax_step(s, logits.scale, x.top, x.sum, alpha);
    bool moved = false; /* most tiles leave the maxima where they are */
    each_row<MT>([&](int m, int half) { moved |= alpha[m][half] != 1; });
    if (__any_sync(ALL_LANES, moved))
      each_number<MT, D / 8>([&](int m, int d, int half, int j) { x.o[m][d][2 * half + j] *= alpha[m][half]; });
    if constexpr (sizeof(E) == 4) {
      read_seen();
      add_values_seen<D>(x.o, s, v + key * D, seen);
    } else {
      if (!finite) {
        read_seen();
        add_nonfinite<E, D, NT * 8>(x.o, v + key * D, seen);
        clear_nonfinite<E, D, X::KEYS, X::THREADS>(v);
      }
      add_values<E, D, EXACT>(x.o, s, v + key * D);
    }
  }
  cp_async_wait<0>(); /* the copy of Q, where a split has no columns */
  __syncthreads();    /* and the caller's work in shared memory before */
}

/* Writes the tile's part: ml [rows] and o [rows, dims], of its first rows. q: shared memory as in attend_columns. */
template <class E, int D, class X>
static __device__ __forceinline__ void put_part(const Attended<X::MT, D> &x, E *q, int rows, int dims, float *o,
                                                float2 *ml) {
  float2 *const ml_at = X::KEY_WARPS == 1 ? ml : reinterpret_cast<float2 *>(q);
  float *const o_at = X::KEY_WARPS == 1 ? o : reinterpret_cast<float *>(q + X::ROWS * D);
  each_row<X::MT>([&](int m, int half) {
    const float sum = lanes_sum<4>(x.sum[m][half]);
    const int r = warp_row<X>() + 16 * m + 8 * half + fragment_row();
    const int at = r * X::KEY_WARPS + (X::KEY_WARPS == 1 ? 0 : warp_id());
    if (r >= rows) return;
    if (fragment_column() == 0) ml_at[at] = make_float2(x.top[m][half], sum);
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      const int column = d * 8 + fragment_column();
      if (column < dims)
        *reinterpret_cast<float2 *>(o_at + at * dims + column) =
            make_float2(x.o[m][d][2 * half], x.o[m][d][2 * half + 1]);
    }
  });
  if constexpr (X::KEY_WARPS > 1) merge_parts(X::KEY_WARPS, ml_at, o_at, rows, dims, o, ml);
}
#endif
