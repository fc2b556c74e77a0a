/* Decode in 16 bits on tensor cores. Each warp computes its own tiles of a split's slots. It copies them through a
 * ring of stages in shared memory that no other warp fills or reads, so no warp waits for another before results are
 * merged.
 *
 * Unpacked rows are copied into swizzled tiles (tile.cuh). Packed rows are copied as bytes and converted to fp16 in
 * registers (bytes.cuh). The scale of a packed key multiplies the logit, that of a packed value the attention
 * weight, so no stored number is rounded. Attention weights and rotated queries are rounded to 16 bits; each is
 * multiplied as two numbers, the rounded one and the remainder. For up to 8 heads the remainders are rows 8 to 15 of
 * the same product, for more heads they need a second product. */
#ifndef KV_RING_CUH
#define KV_RING_CUH
#include "ring_shared.cuh"
#include "state.cuh"

/* The largest attention weight is scaled to 2^LIFT, so that fp16 holds small weights, too. */
constexpr float LIFT = 10;

/* Replaces logits p by weights 2^(p - top + LIFT), after top is raised to the rows' maximum so far. alpha becomes
 * the factor by which earlier results must be multiplied. */
template <int HALVES, int NT>
KV_DEVICE void weigh(float (&p)[NT][4], float (&top)[HALVES], float (&alpha)[HALVES]) {
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < NT; n++) most = fmaxf(most, fmaxf(p[n][2 * half], p[n][2 * half + 1]));
    most = fmaxf(top[half], lanes_max<4>(most));
    const float at = most == -INFINITY ? 0 : most;
    alpha[half] = exp2_approx(top[half] - at);
    top[half] = most;
    unrolled<NT, 2>([&](int n, int j) { p[n][2 * half + j] = exp2_approx(p[n][2 * half + j] - (at - LIFT)); });
  }
}

/* The results of one warp for ROWS (8 or 16) query heads of one kv head. A lane holds numbers of head lane / 4 and,
 * if ROWS is 16, also of head lane / 4 + 8. PACKED: keys, values or both are packed. */
template <class E, int D, int ROWS, bool PACKED>
struct RingHeads {
  static constexpr int HALVES = ROWS / 8, PARTS = ROWS / 8, KEYS = PACKED || D == 64 ? 32 : 16, NT = KEYS / 8;
  static constexpr int MOST_WARPS = D == 256 ? 2 : 4;
  using Heads = RingQueries<E, D, ROWS, PACKED>; /* the queries, at the start of shared memory */

  float o[D / 8][4], top[HALVES], sum[HALVES], value_top[HALVES], least[HALVES];

  KV_DEVICE Heads *heads() { return shared_memory<Heads>(); }
  KV_DEVICE unsigned char *stages() { return shared_memory<unsigned char>() + (sizeof(Heads) + 127) / 128 * 128; }
  KV_DEVICE int head(int half) { return lane_id() / 4 + 8 * half; }

  /* Starts copying one tile, the columns from c0 on that are before c1, to `to`; of packed columns only those before
   * `stored`. */
  KV_DEVICE void load(unsigned char *to, const Columns &x, int c0, int c1, int stored, int dims) {
    if (PACKED && x.kind != KV_AS_COMPUTED)
      warp_load_packed<KEYS>(to, x, c0, stored);
    else
      warp_load<E, D, KEYS>(reinterpret_cast<E *>(to), x, c0, c1, dims);
  }

  /* Returns the key, counted from the tile's first, of this lane's number j (0 or 1) in the n-th 8-column block. */
  KV_DEVICE int key(int n, int j) { return KEYS / 4 * (lane_id() % 4) + 2 * n + j; }

  /* s = q.k for the tile of keys at `at`, whose first column is c0. */
  KV_DEVICE void products(float (&s)[NT][4], const unsigned char *at, const Columns &k, int c0) {
#pragma unroll
    for (int n = 0; n < NT; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
    if (!PACKED || k.kind == KV_AS_COMPUTED) {
      const E *const tile = reinterpret_cast<const E *>(at);
      constexpr int period = D / VECTOR<E> % 8 ? 4 : 8; /* the swizzle's period in vectors */
#pragma unroll
      for (int step = 0; step < D / 16; step++) {
        uint32_t x[1][4], y[4];
        heads()->get(x, step);
        const int c = 2 * step % period, lane = lane_id();
        const E *const from =
            tile + tile_at<E, D>(lane / 16 * 8 + lane % 8, c + lane / 8 % 2) + (2 * step - c) * VECTOR<E>;
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
          ldmatrix_x4(y[0], y[1], y[2], y[3], from + n * 8 * D);
          mma<E>(s[n], x[0], y[0], y[1]), mma<E>(s[n + 1], x[0], y[2], y[3]);
        }
      }
      return;
    }
    const PackedTile tile = packed_at(at, k, c0);
    packed_products<D, PARTS>(s, tile, [](auto &x, int step) { heads()->get(x, step); });
    float unit[HALVES], sum[HALVES], centre[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      unit[half] = heads()->unit[head(half)], sum[half] = heads()->sum[head(half)],
      centre[half] = heads()->centre[head(half)];
    unrolled<NT, 2>([&](int n, int j) {
      if (HALVES == 1 && k.kind == KV_INT4) s[n][j] += s[n][2 + j];
      const float2 ends = tile.ends(key(n, j));
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        float &x = s[n][2 * half + j];
        x = fmaf(ends.x * unit[half], x, fmaf(ends.y, sum[half], centre[half]));
      }
    });
  }

  /* o += P V for the tile of values at `at`, whose first column is c0. p: weights from weigh, for packed values
   * times the values' scales. */
  __device__ __forceinline__ void add(const float (&p)[NT][4], const unsigned char *at, const Columns &v, int c0) {
    const bool packed = PACKED && v.kind != KV_AS_COMPUTED;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      uint32_t x[PARTS][4];
      if (packed) {
        parts<f16>(x, p, k);
        packed_add<D, KEYS>(o, x, packed_at(at, v, c0), k);
        continue;
      }
      parts<E>(x, p, k);
      const E *const tile = reinterpret_cast<const E *>(at);
#pragma unroll
      for (int d = 0; d < D / 8; d += 2) {
        uint32_t y[4];
        ldmatrix_x4_trans(y[0], y[1], y[2], y[3],
                          tile + tile_at<E, D>(lane_id() % 16, d + lane_id() / 16) + k * 16 * D);
        mma_parts<E>(o[d], x, y[0], y[1]), mma_parts<E>(o[d + 1], x, y[2], y[3]);
      }
    }
  }

  /* x = the fragments of columns 16 k .. 16 k + 15 of p, rounded to F, and the fragments of the remainders of this
   * rounding. */
  template <class F>
  KV_DEVICE void parts(uint32_t (&x)[PARTS][4], const float (&p)[NT][4], int k) {
    unrolled<2, HALVES>([&](int right, int half) {
      const float *const from = p[2 * k + right] + 2 * half;
      const uint32_t near = pack<F>(from[0], from[1]);
      const float2 kept = unpack<F>(near);
      x[0][2 * right + half] = near;
      x[PARTS - 1][2 * right + (PARTS == 1 ? 1 : half)] = pack<F>(from[0] - kept.x, from[1] - kept.y);
    });
  }

  /* Adds one tile to the results: the columns from c0 on that are before `count`. keep(s, c0) gets their logits in
   * log2 units. */
  template <class Keep>
  __device__ __forceinline__ void step(const unsigned char *at, const Ring &ring, const Columns &k, const Columns &v,
                                       int c0, int count, const Logits &logits, Keep keep) {
    const bool packed = PACKED && v.kind != KV_AS_COMPUTED;
    float s[NT][4], alpha[HALVES], factor[HALVES];
    products(s, at, k, c0);
    if (logits.transformed) each([&](int n, int i) { s[n][i] = logits.of(s[n][i]); });
    each([&](int n, int i) { s[n][i] *= logits.scale; });
    if (c0 + KEYS > count) each([&](int n, int i) { s[n][i] = c0 + key(n, i % 2) < count ? s[n][i] : -INFINITY; });
    keep(s, c0);
    at += ring.keys;
    if (packed) {
      const PackedTile tile = packed_at(at, v, c0);
      float p[NT][4];
      each([&](int n, int i) { p[n][i] = s[n][i]; });
      weigh(p, top, alpha);
#pragma unroll
      for (int half = 0; half < HALVES; half++) sum[half] *= alpha[half], least[half] *= alpha[half];
      unrolled<NT, 2>([&](int n, int j) {
        const bool seen = c0 + key(n, j) < count;
        const float2 ends = tile.ends(key(n, j));
        const float more = log2_approx(ends.x), low = seen ? ends.y : 0;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          const int i = 2 * half + j;
          sum[half] += p[n][i], least[half] += p[n][i] * low;
          s[n][i] = seen ? s[n][i] + more : -INFINITY;
        }
      });
      weigh(s, value_top, factor);
    } else {
      weigh(s, top, factor);
#pragma unroll
      for (int half = 0; half < HALVES; half++) sum[half] *= factor[half];
      each([&](int n, int i) { sum[i / 2] += s[n][i]; });
    }
    const bool moved = factor[0] != 1 || factor[HALVES - 1] != 1; /* most tiles do not change the maxima */
    if (__any_sync(ALL_LANES, moved))
      unrolled<D / 8, 4>([&](int d, int i) { o[d][i] *= factor[HALVES == 1 ? 0 : i / 2]; });
    add(s, at, v, c0);
  }

  /* Calls f(n, i) for each logit or weight s[n][i] that a lane holds; it belongs to head(i / 2) and key(n, i % 2). */
  template <class F>
  KV_DEVICE void each(F f) {
    unrolled<NT, 2 * HALVES>(f);
  }

  /* Computes the attention over columns c0 .. c1 - 1, whose tiles the block's warps take in turn. Query r of `rows` is
   * at query(r). If slots are packed and column `stored`, the new row, is before c1, all warps call pack() to pack and
   * store it before any of them reads it. */
  template <class Query, class Pack, class Keep>
  __device__ __forceinline__ void attend(const Ring &ring, Query query, int rows, const Columns &k, const Columns &v,
                                         int c0, int c1, int stored, int dims, const Logits &logits, Pack pack,
                                         Keep keep) {
    unsigned char *const mine = stages() + warp_id() * ring.stages * ring.stage();
    const int apart = KEYS * (int)blockDim.x / 32;
    int c = c0 + KEYS * warp_id();
    for (int i = 0; i < ring.stages; i++) {
      if (c + i * apart < c1) {
        load(mine + i * ring.stage(), k, c + i * apart, c1, stored, dims);
        load(mine + i * ring.stage() + ring.keys, v, c + i * apart, c1, stored, dims);
      }
      cp_async_commit();
    }
    if (threadIdx.x == 0) heads()->keys = k, heads()->values = v;
    for (int r = warp_id(); r < rows; r += blockDim.x / 32) heads()->put(query(r), r, k, dims);
    if (PACKED && stored < c1) pack();
    __syncthreads();
#pragma unroll
    for (int half = 0; half < HALVES; half++) top[half] = value_top[half] = -INFINITY, sum[half] = least[half] = 0;
#pragma unroll
    for (int d = 0; d < D / 8; d++) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0;
    const Columns &keys = heads()->keys, &values = heads()->values;
    unsigned char *at = mine;
    for (; c < c1; c += apart) {
      cp_async_wait_but(ring.stages - 1);
      if (PACKED && stored < c1 && c + KEYS > stored) {
        __syncwarp(); /* copies fill 16 bytes with zeros, which may lie where column `stored` goes */
        copy_packed(at, keys, c, stored), copy_packed(at + ring.keys, values, c, stored);
      }
      __syncwarp(); /* all lanes' copies have arrived */
      step(at, ring, keys, values, c, c1, logits, keep);
      __syncwarp(); /* all lanes have read the stage */
      const int next = c + ring.stages * apart;
      if (next < c1) {
        load(at, keys, next, c1, stored, dims);
        load(at + ring.keys, values, next, c1, stored, dims);
      }
      cp_async_commit();
      at = at + ring.stage() == mine + ring.stages * ring.stage() ? mine : at + ring.stage();
    }
    cp_async_wait<0>();
  }

  static int64_t part_bytes(int64_t rows, int64_t warps, int64_t dims) { return rows * warps * (dims + 2) * 4; }

  /* Merges the warps' results into o_out [.., dims] and states_out [..], row r at index place(r). If values are packed
   * in 4 bits, o_out is still rotated by the Hadamard matrix. */
  template <class At>
  __device__ __forceinline__ void merge(int rows, int dims, float *o_out, kv_state *states_out, At place) const {
    const int warps = blockDim.x / 32;
    const kv_kind kind = PACKED ? heads()->values.kind : KV_AS_COMPUTED;
    kv_state *const states = reinterpret_cast<kv_state *>(stages());
    float *const part = reinterpret_cast<float *>(states + rows * warps);
    __syncthreads(); /* all warps have read their stages */
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const float length = lanes_sum<4>(sum[half]), low = lanes_sum<4>(least[half]);
      if (head(half) >= rows) continue;
      const int at = head(half) * warps + warp_id();
      const kv_state state = {top[half], length};
      const float factor = kind != KV_AS_COMPUTED ? state.weight(value_top[half]) : 1;
      if (lane_id() % 4 == 0) states[at] = {state.m - LIFT, length};
      unrolled<D / 8, 2>([&](int d, int j) {
        const int to = packed_place(kind, d, fragment_column() + j, dims);
        const float x = HALVES == 1 ? o[d][j] + o[d][2 + j] : o[d][2 * half + j];
        if (to < dims) part[at * dims + to] = fmaf(factor, x, low);
      });
    }
    merge_groups(warps, states, part, rows, dims, o_out, states_out, place);
  }
};
#endif
