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

/* One column of T of a head's rows; alive slot i is stored row i if i < len. Steps are in bytes. */
struct Column {
  const char *stored, *fresh;
  char *to;
  int64_t step, fresh_step; /* of the rows stored, before and after; of the new */
};

/* All threads come here; those with mine = false have no column. Thread `lane` of `lanes` takes every so many rows. */
template <class T>
__device__ void move_column(Column x, bool mine, const int32_t *index, int len, int keep, int lane, int lanes) {
  for (int j0 = 0; j0 < keep; j0 += UNROLL * lanes) {
    T row[UNROLL];
    uint32_t moves = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int j = j0 + u * lanes + lane;
      if (!mine || j >= keep) continue;
      const int i = index ? index[j] : j;
      const char *from = i < len ? x.stored + i * x.step : x.fresh + (i - len) * x.fresh_step;
      if (from == x.to + j * x.step) continue;
      row[u] = *reinterpret_cast<const T *>(from);
      moves |= 1u << u;
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (moves >> u & 1) *reinterpret_cast<T *>(x.to + (j0 + u * lanes + lane) * x.step) = row[u];
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
    const Column x = {(const char *)(a.src.pos + src), (const char *)(a.fresh.pos + b * a.S + first),
                      (char *)(a.dst.pos + dst), 4, 4};
    move_column<uint32_t>(x, true, index, len, keep, threadIdx.x, THREADS);
    return;
  }
  const bool keys = (int)blockIdx.y < strips;
  const int lanes = STRIP / 16, at = blockIdx.y % strips * STRIP + threadIdx.x % lanes * 16;
  const int64_t *stride = keys ? a.fresh.k_stride : a.fresh.v_stride, size = width / a.D;
  const char *fresh = (const char *)(keys ? a.fresh.k : a.fresh.v);
  const Column x = {(const char *)(keys ? a.src.k : a.src.v) + src * width + at,
                    fresh + (b * stride[0] + h * stride[1] + first * stride[2]) * size + at,
                    (char *)(keys ? a.dst.k : a.dst.v) + dst * width + at, width, stride[2] * size};
  move_column<uint4>(x, at < width, index, len, keep, threadIdx.x / lanes, THREADS / lanes);
}

}  // namespace

int kv_compact_cuda(const kv_compact *a, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  const int width = (int)a->D * (a->dtype == KV_F32 ? 4 : 2), strips = (width + STRIP - 1) / STRIP;
  if (heads == 0) return 0;
  return launch<compact_strip>(dim3((unsigned)heads, 2 * strips + 1), THREADS, 0, stream, *a, width);
}
