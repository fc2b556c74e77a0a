/* Moves kept slots of [stored | new] together on a GPU. A block owns a strip of 32 bytes of all rows of one head's keys
 * or values, or the head's positions, and goes through the rows in tiles: load, barrier, store.
 *
 * In place: an ascending index has index[j] >= j, so a tile reads rows at or behind its own; what it overwrites no later
 * tile reads, and the barrier lets all of a tile be read before any of it is written.
 *
 * budget: regs 80, smem 0 */
#include "kvevict.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace {

constexpr int THREADS = 256, UNROLL = 8, STRIP = 32;

/* One column of T of a head's rows, as addresses: alive slot i is stored row i if i < len, else a new one. */
struct Column {
  uint64_t stored, fresh, to; /* where slot 0 of each would be */
  uint32_t step, fresh_step;  /* in bytes: of the rows stored, before and after; of the new */
};

/* from: the slots that go to rows j, j + lanes, .. */
__device__ __forceinline__ void load_indices(const int32_t *index, int j, int keep, int lanes, int (&from)[UNROLL]) {
#pragma unroll
  for (int u = 0; u < UNROLL; u++, j += lanes) from[u] = index && j < keep ? index[j] : j;
}

/* All threads come here; those with mine = false have no column. Thread `lane` of `lanes` takes every so many rows. */
template <class T>
__device__ void move_column(Column x, bool mine, const int32_t *index, int len, int keep, int lane, int lanes) {
  int from[UNROLL];
  load_indices(index, lane, keep, lanes, from);
  for (int j0 = lane; j0 - lane < keep; j0 += UNROLL * lanes) {
    T row[UNROLL];
    uint32_t moves = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const uint32_t i = from[u], j = j0 + u * lanes;
      const bool old = (int)i < len, there = old && i == j && x.stored == x.to;
      const uint64_t at = (old ? x.stored : x.fresh) + (uint64_t)i * (old ? x.step : x.fresh_step);
      if (!mine || (int)j >= keep || there) continue;
      row[u] = *reinterpret_cast<const T *>(at);
      moves |= 1u << u;
    }
    load_indices(index, j0 + UNROLL * lanes, keep, lanes, from); /* of the next tile, on their way with these rows */
    __syncthreads();
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (moves >> u & 1) *reinterpret_cast<T *>(x.to + (uint64_t)(uint32_t)(j0 + u * lanes) * x.step) = row[u];
  }
}

/* Block (head, i): i counts the strips of the keys, then those of the values, then the positions. width: of a row, in
 * bytes. */
__global__ void __launch_bounds__(THREADS) compact_strip(const kv_compact a, int width) {
  const int64_t head = blockIdx.x, b = head / a.Hkv, h = head % a.Hkv;
  const int strips = (width + STRIP - 1) / STRIP, len = a.src.len[head], keep = a.keep[head], first = a.fresh.first[b];
  const int32_t *index = a.index ? a.index + head * a.K : nullptr;
  const int64_t src = a.src.offset[head], dst = a.dst.offset[head];
  if ((int)blockIdx.y == 2 * strips) {
    const Column x = {(uint64_t)(a.src.pos + src), (uint64_t)(a.fresh.pos + b * a.S + first) - 4 * (uint64_t)len,
                      (uint64_t)(a.dst.pos + dst), 4, 4};
    move_column<uint32_t>(x, true, index, len, keep, threadIdx.x, THREADS);
    return;
  }
  const bool keys = (int)blockIdx.y < strips;
  const int lanes = STRIP / 16, at = blockIdx.y % strips * STRIP + threadIdx.x % lanes * 16;
  const int64_t *stride = keys ? a.fresh.k_stride : a.fresh.v_stride, size = width / a.D;
  const uint64_t fresh = (b * stride[0] + h * stride[1] + (first - len) * stride[2]) * size + at;
  const Column x = {
      (uint64_t)(keys ? a.src.k : a.src.v) + src * width + at, (uint64_t)(keys ? a.fresh.k : a.fresh.v) + fresh,
      (uint64_t)(keys ? a.dst.k : a.dst.v) + dst * width + at, (uint32_t)width, (uint32_t)(stride[2] * size)};
  move_column<uint4>(x, at < width, index, len, keep, threadIdx.x / lanes, THREADS / lanes);
}

}  // namespace

int kv_compact_cuda(const kv_compact *a, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  const int width = (int)a->D * (a->dtype == KV_F32 ? 4 : 2), strips = (width + STRIP - 1) / STRIP;
  if (heads == 0) return 0;
  return launch<compact_strip>(dim3((unsigned)heads, 2 * strips + 1), THREADS, 0, stream, *a, width);
}
