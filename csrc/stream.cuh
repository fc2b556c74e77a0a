/* Attention of few rows over many slots, for attend and decode. The slots of a head are cut into splits that depend
 * only on the number of slots, the shapes and the GPU. Each split leaves the states of its rows in scratch
 * (state.cuh). Splits are merged in order, so results have the same bits every time. */
#ifndef KV_STREAM_CUH
#define KV_STREAM_CUH
#include "state.cuh"

/* Returns the number of slots of a split when n slots are cut into at most `splits` splits. It is a multiple of STEP
 * and at least `least`, itself a multiple of STEP. */
template <int STEP>
KV_DEVICE int split_size(int n, int splits, int least = 2 * STEP) {
  const int fair = (n + splits - 1) / splits;
  return max(least, (fair + STEP - 1) / STEP * STEP);
}

/* A tile of 16 query rows against KEYS keys. Every warp has all 16 rows, and the warps divide the keys among them:
 * reading keys takes longer than the products of 16 rows. The members mean what those of RowTile do. */
template <class E, int D>
struct NarrowTile {
  static constexpr int WARPS = 4, KEY_WARPS = WARPS, MT = 1, ROWS = 16, THREADS = WARPS * 32;
  static constexpr int KEYS = sizeof(E) == 4 && D == 256 ? 32 : 64, STEPS = 4;
  static constexpr size_t TILES = (size_t)(ROWS + 2 * KEYS) * D * sizeof(E), SHARED = TILES + 2 * sizeof(Columns);
};

/* A tile of up to 64 query rows, small enough that several blocks fit a multiprocessor. */
template <class E, int D>
using MediumTile = RowTile<E, D, 1>;

/* warp_row returns the first row, warp_key the first key of this warp in a tile X. */
template <class X>
KV_DEVICE int warp_row() {
  return warp_id() / X::KEY_WARPS * X::MT * 16;
}
template <class X>
KV_DEVICE int warp_key() {
  return X::KEY_WARPS == 1 ? 0 : warp_id() * (X::KEYS / X::KEY_WARPS);
}

/* Returns columns c0 .. c1 - 1 of x, renumbered from 0. The result's at.len (stored ones) is at most its at.n (all). */
KV_DEVICE Columns between(Columns x, int c0, int c1) {
  const kv_unsigned from = (kv_unsigned)c0;
  x.at.stored += (uint64_t)from * (kv_unsigned)x.at.stored_stride;
  x.at.chunk += (uint64_t)from * (kv_unsigned)x.at.chunk_stride;
  x.at.n = c1 - c0, x.at.len = min(x.at.len - c0, x.at.n);
  return x;
}

/* Softmax states of a warp's rows over the columns so far, in the layout of fragments. top: the largest logit in
 * log2 units; sum: this lane's part of the sum of the weights. */
template <int MT, int D>
struct Attended {
  float o[MT][D / 8][4], top[MT][2], sum[MT][2];
};

/* Computes the attention of rows r0 .. r0 + ROWS - 1 of `rows` over all keys.at.n columns. Every row sees at least
 * the first `fewest` columns; seen_by(m, half) returns how many a row of this lane sees. look(s, c) gets the warp's
 * logits s [16 MT, 8 NT] of the columns from c on, not yet multiplied by logits.scale. EXACT: as in add_values. q:
 * shared memory for the tiles q, k and v, then for `keys` and `values` themselves, since registers are scarce; it is
 * free again when this returns. */
template <class E, int D, class X, bool EXACT, class From, class Seen, class Look>
KV_DEVICE void attend_columns(Attended<X::MT, D> &x, E *q, const From &rows, int r0, const Columns &keys,
                              const Columns &values, int fewest, int dims, const Logits &logits, Seen seen_by,
                              Look look) {
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
  __syncthreads(); /* kept is written */
#pragma unroll 1
  for (int c0 = 0; c0 < n; c0 += X::KEYS) {
    const bool masked = c0 + X::KEYS > fewest;
    /* not together with the copies: only here are registers free */
    tile_unpack<E, D, X::KEYS, X::THREADS>(k, kept[0], c0, dims);
    cp_async_wait<0>();
    __syncthreads(); /* K is there; all warps have read the previous tile's V */
    tile_load<E, D, X::KEYS, X::THREADS>(v, kept[1], c0, dims);
    cp_async_commit();
    float s[MT][NT][4], alpha[MT][2];
    multiply<E, D, X::STEPS>(s, q, warp_row<X>(), k + key * D);
    cp_async_wait<0>();
    /* tile_finite reads rows that other threads wrote in tile_unpack */
    if (D % 64 && kept[1].packed() > c0) __syncthreads();
    /* V is there; all warps have read K. */
    const bool finite = __syncthreads_and(sizeof(E) == 4 || !masked || tile_finite<E, D, X::KEYS, X::THREADS>(v));
    tile_copy<E, D, X::KEYS, X::THREADS>(k, kept[0], c0 + X::KEYS, dims);
    cp_async_commit();
    int seen[MT][2]; /* read just before use, since registers are scarce */
    const auto read_seen = [&] { each_row<MT>([&](int m, int half) { seen[m][half] = seen_by(m, half) - c0 - key; }); };
    transform(s, logits);
    look(s, c0 + key);
    if (masked) read_seen(), mask(s, seen);
    softmax_step(s, logits.scale, x.top, x.sum, alpha);
    bool moved = false; /* most tiles do not change the maxima */
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
  cp_async_wait<0>(); /* waits for the copy of Q, if there are no columns */
  __syncthreads();    /* and the caller may reuse shared memory: all warps are done with it */
}

/* Writes the states [rows] and o [rows, dims] of the tile's first `rows` rows. Where warps have divided the keys,
 * their states are merged first. q: shared memory as in attend_columns. */
template <class E, int D, class X>
KV_DEVICE void put_part(const Attended<X::MT, D> &x, E *q, int rows, int dims, float *o, kv_state *states) {
  kv_state *const states_at = X::KEY_WARPS == 1 ? states : reinterpret_cast<kv_state *>(q);
  float *const o_at = X::KEY_WARPS == 1 ? o : reinterpret_cast<float *>(q + X::ROWS * D);
  each_row<X::MT>([&](int m, int half) {
    const float sum = lanes_sum<4>(x.sum[m][half]);
    const int r = warp_row<X>() + 16 * m + 8 * half + fragment_row();
    const int at = r * X::KEY_WARPS + (X::KEY_WARPS == 1 ? 0 : warp_id());
    if (r >= rows) return;
    if (fragment_column() == 0) states_at[at] = {x.top[m][half], sum};
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      const int column = d * 8 + fragment_column();
      if (column < dims)
        *reinterpret_cast<float2 *>(o_at + at * dims + column) =
            make_float2(x.o[m][d][2 * half], x.o[m][d][2 * half + 1]);
    }
  });
  if constexpr (X::KEY_WARPS > 1) merge_groups(X::KEY_WARPS, states_at, o_at, rows, dims, o, states);
}
#endif
