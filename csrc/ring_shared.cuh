/* The layout of shared memory in ring.cuh: first the queries as fragments of mma, then the warps' stages. */
#ifndef KV_RING_SHARED_CUH
#define KV_RING_SHARED_CUH
#include "bytes.cuh"

/* The queries of ROWS query heads of one kv head. With packed keys, q.k = unit * scale * (q / unit).u + offset * sum
 * + centre. Of the key, u are the stored numbers, scale and offset those of PackedTile::ends. Of the query, q are
 * the numbers, rotated if keys are, `unit` is a power of two, `sum` the sum of q, and `centre` the dot product of
 * the unrotated query and the keys' centre. */
template <class E, int D, int ROWS, bool PACKED>
struct RingQueries {
  static constexpr int PARTS = ROWS / 8, V = (D + 127) / 128;

  float unit[ROWS], sum[ROWS], centre[ROWS];
  Columns keys, values;                             /* kept here, since registers are scarce */
  int batch[4][ROWS];                               /* of each warp: the batch rows whose queries are in the tile */
  alignas(16) uint32_t query[D / 16][PARTS][32][4]; /* fragments of q, or of q / unit with packed keys */

  /* Stores query r, `dims` numbers at `from`, as fragments. All lanes of one warp must call it together. */
  __device__ __forceinline__ void put(const E *from, int r, const Columns &k, int dims) {
    float x[V][4] = {}, top = 0, centre = 0, sum = 0, unit = 1;
#pragma unroll
    for (int v = 0; v < V; v++) {
      const int d = (v * 32 + lane_id()) * 4;
      if (d >= dims) continue;
      const uint2 four = *reinterpret_cast<const uint2 *>(from + d);
      const float2 a = unpack<E>(four.x), b = unpack<E>(four.y);
      x[v][0] = a.x, x[v][1] = a.y, x[v][2] = b.x, x[v][3] = b.y;
      if (!k.centre) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) centre += x[v][i] * k.centre[d + i];
    }
    if (PACKED && k.kind != KV_AS_COMPUTED) {
      if (k.kind == KV_INT4) hadamard<4, 32, V>(x, dims);
      unrolled<V, 4>([&](int v, int i) { top = fmaxf(top, fabsf(x[v][i])), sum += x[v][i]; });
      const float power = __uint_as_float(__float_as_uint(lanes_max(top)) & 0x7f800000u);
      if (power > 0 && power < INFINITY) unit = power;
      centre = lanes_sum(centre), sum = lanes_sum(sum);
      if (lane_id() == 0) this->unit[r] = unit, this->sum[r] = sum, this->centre[r] = centre;
    }
    const int row = r % 8 * 4, half = r / 8;
#pragma unroll
    for (int v = 0; v < V; v++) {
      const int d = (v * 32 + lane_id()) * 4;
      if (d >= dims) continue;
      if (!PACKED || k.kind == KV_AS_COMPUTED) {
        uint32_t(*const at)[4] = query[d / 16][0] + row + d % 8 / 2;
        const int i = d % 16 / 8 * 2 + half;
        at[0][i] = pack<E>(x[v][0], x[v][1]), at[1][i] = pack<E>(x[v][2], x[v][3]);
        continue;
      }
      const Word word = word_of(k.kind, d, dims);
      const float over = 1 / unit; /* exact, since unit is a power of two */
#pragma unroll
      for (int i = 0; i < 2; i++) { /* the numbers multiplied with bytes 0 and 2 of a key's word, then with 1 and 3 */
        const float a = x[v][i] * over, b = x[v][i + 2] * over;
        const uint32_t near = pack<f16>(a, b);
        const float2 kept = unpack<f16>(near);
        const uint32_t rest = pack<f16>(a - kept.x, b - kept.y);
        query[word.step][0][row + word.lane][2 * i + half] = near;
        if (k.kind == KV_INT4) query[word.step][PARTS - 1][row + word.lane][2 * i + (PARTS == 1 ? 1 : half)] = rest;
      }
    }
  }

  /* Makes all fragments 0, since fewer than ROWS queries do not fill them. All warps call it, before a barrier and
   * put. */
  __device__ __forceinline__ void clear() {
    uint4 *const all = reinterpret_cast<uint4 *>(query);
    for (int i = threadIdx.x; i < D / 16 * PARTS * 32; i += blockDim.x) all[i] = make_uint4(0, 0, 0, 0);
  }

  template <int N>
  __device__ __forceinline__ void get(uint32_t (&x)[N][4], int step) const {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const uint4 part = *reinterpret_cast<const uint4 *>(query[step][i][lane_id()]);
      x[i][0] = part.x, x[i][1] = part.y, x[i][2] = part.z, x[i][3] = part.w;
    }
  }
};

/* Sizes of the ring of stages, which follows the queries in shared memory. */
struct Ring {
  int warps, stages, keys, values; /* warps; stages of each warp; bytes of a stage's keys and of its values */

  __host__ __device__ __forceinline__ int stage() const { return keys + values; }
  __host__ __device__ __forceinline__ int bytes() const { return warps * stages * stage(); }
};

/* Starts copying columns c0 .. c0 + KEYS - 1 into tile [KEYS, D]: row p gets column c0 + key_of(p). Columns from c1
 * on and numbers from dims on become 0. */
template <class E, int D, int KEYS>
KV_DEVICE void warp_load(E *tile, const Columns &x, int c0, int c1, int dims) {
  constexpr int vectors = D / VECTOR<E>, lanes = vectors % 8 ? 4 : vectors, rows = 32 / lanes;
  const int r = lane_id() / lanes, c = lane_id() % lanes;
  if (c0 + KEYS <= min(c1, x.at.len) && dims == D) {
    const uint64_t from = x.at.stored + (uint64_t)(kv_unsigned)(c0 + key_of<KEYS>(r)) * (D * sizeof(E)) + c * 16;
#pragma unroll
    for (int i = 0; i < KEYS; i += rows)
#pragma unroll
      for (int j = 0; j < vectors; j += lanes)
        cp_async_16(tile + tile_at<E, D>(r + i, c + j),
                    reinterpret_cast<const void *>(from + key_of<KEYS>(i) * (D * (int)sizeof(E)) + j * 16));
    return;
  }
#pragma unroll 1
  for (int i = 0; i < KEYS; i += rows)
#pragma unroll 1
    for (int j = 0; j < vectors; j += lanes) {
      const int key = c0 + key_of<KEYS>(r + i);
      const bool there = key < c1 && (c + j) * VECTOR<E> < dims;
      const uint64_t from = row_at(x.at, key) + (c + j) * 16;
      cp_async_16(tile + tile_at<E, D>(r + i, c + j), reinterpret_cast<const void *>(from), there ? 16 : 0);
    }
}

/* Starts copying packed columns c0 .. min(c0 + KEYS, c1) - 1 as bytes. They begin at byte (address of column c0) %
 * 16 of `to`. No byte before column c0 is read: the row there may be another head's new row, not yet written. */
template <int KEYS>
KV_DEVICE void warp_load_packed(unsigned char *to, const Columns &x, int c0, int c1) {
  const uint64_t first = x.at.stored + (uint64_t)(kv_unsigned)c0 * (kv_unsigned)x.at.stored_stride,
                 from = first & ~15ull;
  const int skip = (int)(first - from), bytes = skip + min(KEYS, c1 - c0) * x.at.stored_stride, word = 4 * lane_id();
  if (skip > 0 && word >= skip && word < min(16, bytes))
    cp_async_4(to + word, reinterpret_cast<const void *>(from + word));
  for (int at = (skip + 15) / 16 * 16 + 4 * word; at < bytes; at += 16 * 32)
    cp_async_16(to + at, reinterpret_cast<const void *>(from + at), min(16, bytes - at));
}

/* Returns the packed rows of the tile that warp_load_packed copied to `at` from column c0 on. */
KV_DEVICE PackedTile packed_at(const unsigned char *at, const Columns &x, int c0) {
  const uint32_t low = (uint32_t)x.at.stored + (uint32_t)c0 * (uint32_t)x.at.stored_stride;
  return {reinterpret_cast<const uint32_t *>(at + low % 16), x.at.stored_stride / 4, x.kind};
}

/* Copies column c, which this kernel has packed and stored, into the tile at `to` that starts with column c0. */
KV_DEVICE void copy_packed(unsigned char *to, const Columns &x, int c0, int c) {
  if (x.kind == KV_AS_COMPUTED) return;
  const uint64_t first = x.at.stored + (uint64_t)(kv_unsigned)c0 * (kv_unsigned)x.at.stored_stride;
  const int from = (c - c0) * x.at.stored_stride;
  const uint32_t *const words = reinterpret_cast<const uint32_t *>(first + from);
  for (int i = lane_id(); i < x.at.stored_stride / 4; i += 32)
    reinterpret_cast<uint32_t *>(to + first % 16 + from)[i] = words[i];
}
#endif
