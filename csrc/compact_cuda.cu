/* Moves the kept slots of [stored | new] together on a GPU. A block moves a strip of 32 bytes of every row of one
 * head's keys or values, or the head's positions, in tiles of rows: load, barrier, store.
 *
 * In place: an ascending index has index[j] >= j, so a tile reads its own rows or later ones; no later tile reads what
 * it overwrites, and the barrier separates all reads of a tile from its writes.
 *
 * budget: regs 80, smem 0 */
#include "launch.cuh"
#include "vector.cuh"

constexpr int THREADS = 256, UNROLL = 8, STRIP = 32;

/* from: the slots that move to rows j, j + lanes, .. */
static __device__ __forceinline__ void load_indices(const int32_t *index, int j, int keep, int lanes,
                                                    int (&from)[UNROLL]) {
#pragma unroll
  for (int u = 0; u < UNROLL; u++, j += lanes) from[u] = index && j < keep ? index[j] : j;
}

/* Moves one column of T of a head's rows from slots x to rows that start at `to`, spaced as the stored ones. Called by
 * all threads of the block; those with mine = false have no column. Thread `lane` of `lanes` moves every `lanes`-th
 * row. */
template <class T>
static __device__ void move_column(kv_segments x, uint64_t to, bool mine, const int32_t *index, int keep, int lane,
                                   int lanes) {
  int from[UNROLL];
  load_indices(index, lane, keep, lanes, from);
  for (int j0 = lane; j0 - lane < keep; j0 += UNROLL * lanes) {
    T row[UNROLL];
    uint32_t moves = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int i = from[u], j = j0 + u * lanes;
      const bool in_place = i < x.len && i == j && x.stored == to;
      if (!mine || j >= keep || in_place) continue;
      row[u] = *reinterpret_cast<const T *>(kv_segments_at(&x, i));
      moves |= 1u << u;
    }
    load_indices(index, j0 + UNROLL * lanes, keep, lanes, from); /* of the next tile, loaded together with these rows */
    __syncthreads();
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (moves >> u & 1) *reinterpret_cast<T *>(to + (int64_t)(j0 + u * lanes) * x.stored_stride) = row[u];
  }
}

/* Block (head, i): i counts the strips of the keys, then of the values, then the positions. width: bytes of a row. */
static __global__ void __launch_bounds__(THREADS, 3) compact_kernel(const kv_compact a, int width) {
  const int64_t head = blockIdx.x, b = head / a.Hkv, h = head % a.Hkv;
  const int strips = (width + STRIP - 1) / STRIP, keep = a.keep[head];
  const int32_t *index = a.index ? a.index + head * a.K : nullptr;
  const int64_t dst = a.dst.offset[head];
  if ((int)blockIdx.y == 2 * strips) {
    const kv_segments pos = kv_positions_of(&a.src, &a.chunk, b, h, a.Hkv, a.S);
    move_column<uint32_t>(pos, (uint64_t)(a.dst.pos + dst), true, index, keep, threadIdx.x, THREADS);
    return;
  }
  const bool keys = (int)blockIdx.y < strips;
  const int lanes = STRIP / 16, at = blockIdx.y % strips * STRIP + threadIdx.x % lanes * 16;
  const int64_t size = width / a.D;
  kv_segments x = keys ? kv_keys_of(&a.src, &a.chunk, b, h, a.Hkv, a.S, a.D, size)
                       : kv_values_of(&a.src, &a.chunk, b, h, a.Hkv, a.S, a.D, size);
  x.stored += at, x.chunk += at;
  const uint64_t to = (uint64_t)(keys ? a.dst.k : a.dst.v) + dst * width + at;
  move_column<uint4>(x, to, at < width, index, keep, threadIdx.x / lanes, THREADS / lanes);
}

int64_t kv_compact_cuda_scratch(const kv_compact *) { return 0; }

int kv_compact_cuda(const kv_compact *a, void *, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  const int width = (int)a->D * (a->dtype == KV_F32 ? 4 : 2), strips = (width + STRIP - 1) / STRIP;
  if (heads == 0) return 0;
  return launch<compact_kernel>(dim3((unsigned)heads, 2 * strips + 1), THREADS, 0, stream, *a, width);
}
