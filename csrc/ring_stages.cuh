/* The stages of a ring (ring.cuh): how they lie in shared memory, and how a warp fills one. */
#ifndef KV_RING_STAGES_CUH
#define KV_RING_STAGES_CUH
#include "bytes.cuh"

/* How the stages lie in shared memory, after the queries; in bytes. */
struct Ring {
  int warps, stages, keys, values; /* of a stage: its keys, and its values after them */

  __host__ __device__ __forceinline__ int stage() const { return keys + values; }
  __host__ __device__ __forceinline__ int bytes() const { return warps * stages * stage(); }
};

/* Starts copying columns c0 .. c0 + KEYS - 1, up to c1, into tile [KEYS, D], in the order of key_of; zeros from there
 * and from dims on. */
template <class E, int D, int KEYS>
static __device__ __forceinline__ void warp_load(E *tile, const Columns &x, int c0, int c1, int dims) {
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

/* The same of packed columns, as they are stored, at the bytes that they have after a multiple of 16; no others are read:
 * the row before may be another head's new one. */
template <int KEYS>
static __device__ __forceinline__ void warp_load_packed(unsigned char *to, const Columns &x, int c0, int c1) {
  const uint64_t first = x.at.stored + (uint64_t)(kv_unsigned)c0 * (kv_unsigned)x.at.stored_stride,
                 from = first & ~15ull;
  const int skip = (int)(first - from), bytes = skip + min(KEYS, c1 - c0) * x.at.stored_stride, word = 4 * lane_id();
  if (skip > 0 && word >= skip && word < min(16, bytes))
    cp_async_4(to + word, reinterpret_cast<const void *>(from + word));
  for (int at = (skip + 15) / 16 * 16 + 4 * word; at < bytes; at += 16 * 32)
    cp_async_16(to + at, reinterpret_cast<const void *>(from + at), min(16, bytes - at));
}

/* Where the packed rows of a tile that starts with column c0 lie. */
static __device__ __forceinline__ PackedTile packed_at(const unsigned char *at, const Columns &x, int c0) {
  const uint32_t low = (uint32_t)x.at.stored + (uint32_t)c0 * (uint32_t)x.at.stored_stride;
  return {reinterpret_cast<const uint32_t *>(at + low % 16), x.at.stored_stride / 4, x.kind};
}

/* Column c alone, which this kernel packed. */
static __device__ __forceinline__ void copy_packed(unsigned char *to, const Columns &x, int c0, int c) {
  if (x.kind == KV_AS_COMPUTED) return;
  const uint64_t first = x.at.stored + (uint64_t)(kv_unsigned)c0 * (kv_unsigned)x.at.stored_stride;
  const int from = (c - c0) * x.at.stored_stride;
  const uint32_t *const words = reinterpret_cast<const uint32_t *>(first + from);
  for (int i = lane_id(); i < x.at.stored_stride / 4; i += 32)
    reinterpret_cast<uint32_t *>(to + first % 16 + from)[i] = words[i];
}
#endif
