/* Moves the kept slots of [stored | new] together on a GPU. A block of compact_kernel moves 32 bytes of every row of
 * one head's keys or values, or the head's positions, in tiles of rows: load, barrier, store. Then convert_kernel
 * packs or unpacks keys or values that are packed in only one of src and dst, and packs new rows. It runs last,
 * since new rows may be packed only when the stored packed rows have moved.
 *
 * In place: an ascending index has index[j] >= j, so a tile reads its own rows or later ones. No later tile reads
 * what a tile overwrites, and the barrier separates all reads of a tile from its writes.
 *
 * budget: regs 80, smem 0 (registers of a thread, bytes of a block) */
#include "columns.cuh"
#include "launch.cuh"

constexpr int THREADS = 256, UNROLL = 8, STRIP = 32, PACKERS = 16;

/* Loads into from[u] the slot that moves to row j + u * lanes: without an index, and from row `keep` on, the slot
 * with the row's own number. */
KV_DEVICE void load_indices(const int32_t *index, int j, int keep, int lanes, int (&from)[UNROLL]) {
#pragma unroll
  for (int u = 0; u < UNROLL; u++, j += lanes) from[u] = index && j < keep ? index[j] : j;
}

/* Moves one number of type T of each kept row of a head. Slots of x before `end` move to rows that start at address
 * `to`, with the stride of x's stored rows. All threads of the block must call it, for the barriers; those with mine
 * = false move nothing. `lanes` threads share the rows: this one moves rows lane, lane + lanes, .. */
template <class T>
static __device__ void move_column(kv_segments x, int end, uint64_t to, bool mine, const int32_t *index, int keep,
                                   int lane, int lanes) {
  int from[UNROLL];
  load_indices(index, lane, keep, lanes, from);
  for (int j0 = lane; j0 - lane < keep; j0 += UNROLL * lanes) {
    T row[UNROLL];
    uint32_t moves = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int i = from[u], j = j0 + u * lanes;
      const bool in_place = i < x.len && i == j && x.stored == to;
      if (!mine || j >= keep || i >= end || in_place) continue;
      row[u] = *reinterpret_cast<const T *>(kv_segments_at(&x, i));
      moves |= 1u << u;
    }
    load_indices(index, j0 + UNROLL * lanes, keep, lanes, from); /* the next tile's, loaded together with these rows */
    __syncthreads();
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (moves >> u & 1) *reinterpret_cast<T *>(to + (int64_t)(j0 + u * lanes) * x.stored_stride) = row[u];
  }
}

/* The keys, or the values, of a call: addresses of the rows and how these are packed, in src (from, from_kind) and
 * in dst (to, kind). */
struct Moved {
  const void *from;
  unsigned char *to;
  kv_kind from_kind, kind;
  int bytes; /* bytes of a row in dst */
};

static __host__ __device__ __forceinline__ Moved moved(const kv_compact &a, bool keys) {
  const kv_kind kind = keys ? a.dst.k_kind : a.dst.v_kind;
  return {keys ? a.src.k : a.src.v, static_cast<unsigned char *>(keys ? a.dst.k : a.dst.v),
          keys ? a.src.k_kind : a.src.v_kind, kind,
          (int)(kind == KV_AS_COMPUTED ? a.D * (a.dtype == KV_F32 ? 4 : 2) : kv_packed_bytes(kind, a.D))};
}

/* Returns whether rows are packed in only one of src and dst. */
static __host__ __device__ __forceinline__ bool converts(const Moved &x) {
  return (x.kind == KV_AS_COMPUTED) != (x.from_kind == KV_AS_COMPUTED);
}

static __host__ __device__ __forceinline__ int strips_of(const Moved &x) {
  return converts(x) ? 0 : (x.bytes + STRIP - 1) / STRIP;
}

/* Block (kv head, i) moves the head's i-th piece: first the 32-byte strips of the keys, then those of the values,
 * then the positions. It leaves to convert_kernel the rows that must be packed or unpacked. */
static __global__ void __launch_bounds__(THREADS, 3) compact_kernel(const kv_compact a) {
  const int64_t head = blockIdx.x, b = head / a.Hkv, h = head % a.Hkv;
  const int of_keys = strips_of(moved(a, true)), keep = a.keep[head];
  const int32_t *index = a.index ? a.index + head * a.K : nullptr;
  const int64_t dst = a.dst.offset[head];
  if (blockIdx.y == gridDim.y - 1) {
    const kv_segments pos = kv_positions_of(&a.src, &a.chunk, b, h, a.Hkv, a.S);
    move_column<uint32_t>(pos, pos.n, (uint64_t)(a.dst.pos + dst), true, index, keep, threadIdx.x, THREADS);
    return;
  }
  const bool keys = (int)blockIdx.y < of_keys;
  const Moved x = moved(a, keys);
  const int strip = keys ? blockIdx.y : blockIdx.y - of_keys, size = x.bytes / a.D;
  const kv_segments plain = kv_rows_of(keys ? KV_KEYS : KV_VALUES, &a.src, &a.chunk, b, h, a.Hkv, a.S, a.D, size);
  kv_segments at = columns_of(plain, x.from, a.src.offset[head], x.from_kind, nullptr, a.D).at;
  const bool packed = x.kind != KV_AS_COMPUTED; /* packed rows are a multiple of 4 bytes long, others of 16 */
  const int unit = packed ? 4 : 16, lanes = STRIP / unit, first = strip * STRIP + threadIdx.x % lanes * unit;
  at.stored += first, at.chunk += first;
  const uint64_t to = (uint64_t)x.to + dst * x.bytes + first;
  const int lane = threadIdx.x / lanes;
  if (packed)
    move_column<uint32_t>(at, at.len, to, first < x.bytes, index, keep, lane, THREADS / lanes);
  else
    move_column<uint4>(at, at.n, to, first < x.bytes, index, keep, lane, THREADS / lanes);
}

/* Writes column c of x to `to` as D numbers of type E. All lanes of the warp must call it together. */
template <class E>
KV_DEVICE void unpack_row(const Columns &x, int c, int D, E *to) {
  constexpr int W = VECTOR<E>, V = KV_MOST_D / (32 * W);
  float y[V][W];
  column_numbers<E, 32, V>(x, c, true, D, y);
  unrolled<V, W>([&](int v, int i) {
    const int d = (v * 32 + lane_id()) * W + i;
    if (d < D) to[d] = from_float<E>(y[v][i]);
  });
}

/* Block (kv head, i) packs or unpacks rows of the keys if i is even, of the values if i is odd; one warp a row. */
template <class E>
static __global__ void __launch_bounds__(THREADS, 3) convert_kernel(const kv_compact a) {
  const int64_t head = blockIdx.x, b = head / a.Hkv, h = head % a.Hkv;
  const bool keys = blockIdx.y % 2 == 0;
  const Moved x = moved(a, keys);
  if (x.kind == KV_AS_COMPUTED && x.from_kind == KV_AS_COMPUTED) return;
  const int32_t *index = a.index ? a.index + head * a.K : nullptr;
  const kv_segments plain = kv_rows_of(keys ? KV_KEYS : KV_VALUES, &a.src, &a.chunk, b, h, a.Hkv, a.S, a.D, sizeof(E));
  const Columns rows =
      columns_of(plain, x.from, a.src.offset[head], x.from_kind, keys ? centre_of(a.src, head, a.D) : nullptr, a.D);
  const int keep = a.keep[head], done = x.kind == KV_AS_COMPUTED ? 0 : rows.packed();
  for (int j = blockIdx.y / 2 * (THREADS / 32) + warp_id(); j < keep; j += PACKERS * (THREADS / 32)) {
    const int i = index ? index[j] : j;
    unsigned char *const to = x.to + (a.dst.offset[head] + j) * x.bytes;
    if (i < done) continue;
    if (x.kind == KV_AS_COMPUTED)
      unpack_row(rows, i, (int)a.D, reinterpret_cast<E *>(to));
    else
      pack_row(reinterpret_cast<const E *>(kv_segments_at(&plain, i)), x.kind,
               keys ? centre_of(a.dst, head, a.D) : nullptr, (int)a.D, to);
  }
}

int64_t kv_compact_cuda_scratch(const kv_compact *) { return 0; }

int kv_compact_cuda(const kv_compact *a, void *, void *stream) {
  const Moved k = moved(*a, true), v = moved(*a, false);
  const unsigned heads = (unsigned)(a->B * a->Hkv), strips = strips_of(k) + strips_of(v);
  if (heads == 0) return 0;
  const int error = launch<compact_kernel>(dim3(heads, strips + 1), THREADS, 0, stream, *a);
  const bool plain = k.kind == KV_AS_COMPUTED && v.kind == KV_AS_COMPUTED;
  if (error || (plain && !converts(k) && !converts(v))) return error;
  return dispatch(a->dtype, [&](auto e) {
    return launch<convert_kernel<decltype(e)>>(dim3(heads, 2 * PACKERS), THREADS, 0, stream, *a);
  });
}
