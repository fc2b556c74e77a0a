/* Computes the attention of a chunk's queries over the slots [stored | new] on a GPU, sm_80 and up.
 *
 * A block computes one tile of query rows of one (batch row, kv head) against tiles of keys in ascending order. The
 * rows of the kv head's G query heads are in time-major order: row r is head r % G at step r / G. Shared memory
 * holds Q, one tile of K and one of V; registers hold S and O. V is copied while S = Q K^T is computed, the next K
 * during the softmax and O += P V. Only tiles of keys on the causal diagonal are masked; tiles of keys that no row
 * of the block sees are not read. If all tiles of rows together are too few to fill a GPU, the columns of each tile
 * are cut into splits with one block each, and a second kernel merges the splits. */
// budget: regs 255, smem 99424 (registers of a thread, bytes of a block)
#include "stream.cuh"

/* columns are cut if all heads have at most this many tiles: a large GPU runs more at once */
constexpr int64_t FEW = 128;
constexpr int64_t FULL = 512; /* approximate limit on blocks if columns are cut: two to four for each multiprocessor */

/* What a block knows of a query row, in shared memory since registers are scarce. seen: how many of the split's
 * columns the row sees; step: its time step; to: b * H + its query head or, if columns are cut, the index in Parts
 * of its tile's first row. */
struct alignas(16) AttendRow {
  int seen, step, to;
};

/* Normalizes this lane's part of its rows and writes it to out; one lane of each row also writes lse. */
template <class E, int D, int MT>
KV_DEVICE void attend_finish(const kv_attend &a, const Attended<MT, D> &done, const AttendRow *rows) {
  each_row<MT>([&](int m, int half) {
    const int t = rows[16 * m + 8 * half].step, to = rows[16 * m + 8 * half].to;
    kv_state state = {done.top[m][half], lanes_sum<4>(done.sum[m][half])};
    float over = 1;
    if (t >= a.T) return;
    if (a.sinks) { /* the attention sink is one more logit, without a value */
      const float sink = a.sinks[to % (int)a.H] * LOG2E, before = state.m;
      state.m = fmaxf(before, sink);
      over = state.weight(before);
      state.d = state.d * over + state.weight(sink);
    }
    over = state.normalize(over);
    const int64_t b = to / (int)a.H;
    E *out = static_cast<E *>(a.out) + ((b * a.T + t) * a.H + to % (int)a.H) * a.D;
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      const int column = d * 8 + fragment_column();
      const float x = done.o[m][d][2 * half] * over, y = done.o[m][d][2 * half + 1] * over;
      if (column >= a.D) continue;
      if constexpr (sizeof(E) == 4)
        *reinterpret_cast<float2 *>(out + column) = make_float2(x, y);
      else
        *reinterpret_cast<uint32_t *>(out + column) = pack<E>(x, y);
    }
    if (fragment_column() == 0) a.lse[to * a.T + t] = state.lse();
  });
}

/* Block (i, kv head) computes one tile of the head's rows. With SPLIT it computes one split of the columns and
 * stores the rows' states in parts; without, it computes all columns and writes out and lse. */
template <class E, int D, class X, bool SPLIT>
static __global__ void __launch_bounds__(X::THREADS, 1)
    attend_kernel(const kv_attend a, const Logits logits, const Parts parts) {
  E *const q = shared_memory<E>();
  AttendRow *const known = reinterpret_cast<AttendRow *>(reinterpret_cast<char *>(q) + X::SHARED);
  const AttendRow *const mine = known + warp_row<X>() + fragment_row();
  const int kv_head = block_head();
  if (kv_head >= a.B * a.Hkv) return;
  const int b = kv_head / a.Hkv, h = kv_head % a.Hkv, G = a.H / a.Hkv, thread = threadIdx.x;
  const int stop = a.stop ? a.stop[b] : (int)a.S;
  const Columns keys = head_columns<E>(KV_KEYS, a.slots, a.chunk, b, h, a.Hkv, stop, a.D);
  const Columns values = head_columns<E>(KV_VALUES, a.slots, a.chunk, b, h, a.Hkv, stop, a.D);
  const Rows rows = {h * G, 0, (int)a.T * G, divisor(G)};
  const Bounds bounds = {(int)(keys.at.len - a.chunk.first[b] + a.S - a.T), a.stop ? keys.at.n : keys.at.len,
                         keys.at.n};

  /* The last rows see the most columns, so their blocks start first. */
  const int splits = SPLIT ? parts.splits : 1, split = blockIdx.x % splits;
  const int tile = parts.tiles - 1 - blockIdx.x / splits;
  const int row0 = tile * X::ROWS;
  const int most = bounds.seen(rows.step(min(row0 + X::ROWS, rows.count) - 1));
  const int size = SPLIT ? split_size<X::KEYS>(most, splits) : most, c0 = split * size;
  if (split > 0 && c0 >= most) return;
  const int c1 = min(most, c0 + size), fewest = bounds.seen(rows.step(row0)) - c0;
  const int unit = kv_head * parts.tiles + tile, part = (unit * splits + split) * parts.rows;
  if (SPLIT && split == 0 && thread == 0) parts.count[unit] = most > 0 ? (most + size - 1) / size : 1;
  if (thread < X::ROWS) {
    const int r = row0 + thread;
    const int to = SPLIT ? part : b * (int)a.H + rows.head_of(r);
    known[thread] = {r < rows.count ? bounds.seen(rows.step(r)) - c0 : 0, rows.step(r), to};
  }
  Attended<X::MT, D> x;
  attend_columns<E, D, X, false>(
      x, q, rows_at<E>(rows, a.q, b * a.q_stride[0], a.q_stride[1], a.q_stride[2]), row0, between(keys, c0, c1),
      between(values, c0, c1), fewest, (int)a.D, logits, [&](int m, int half) { return mine[16 * m + 8 * half].seen; },
      [](const auto &, int) {});
  if constexpr (SPLIT) {
    const int64_t at = known->to;
    put_part<E, D, X>(x, q, parts.rows, (int)a.D, parts.o + at * a.D, parts.states + at);
  } else {
    attend_finish<E, D>(a, x, mine);
  }
}

/* Returns the largest number of splits of a tile X's columns, or 1 if they are not cut. Fewer than 4 splits gain
 * less time than merging them takes. */
template <class X>
static int64_t splits_of(const kv_attend *a) {
  const int64_t tiles = (a->T * (a->H / a->Hkv) + X::ROWS - 1) / X::ROWS * a->B * a->Hkv;
  if (tiles > FEW) return 1;
  int64_t splits = (a->rows + a->S) / (2 * X::KEYS);
  if (splits > FULL / tiles) splits = FULL / tiles;
  if (splits > MOST_SPLITS) splits = MOST_SPLITS;
  return splits < 4 ? 1 : splits;
}

/* Calls f(e, d, x, split, parts): e has the element type, d is the padded head dimension, x is attend_kernel's tile,
 * split is true_type if columns are cut, and parts lie in scratch. */
template <class F>
static int planned(const kv_attend *a, Cutter &scratch, F f) {
  const int64_t heads = a->B * a->Hkv, rows = heads ? a->T * (a->H / a->Hkv) : 0;
  if (rows == 0) return 0;
  return dispatch(a->dtype, a->D, [&](auto e, auto d) {
    using E = decltype(e);
    using Wide = RowTile<E, decltype(d)::value>;
    using Medium = MediumTile<E, decltype(d)::value>;
    using Narrow = NarrowTile<E, decltype(d)::value>;
    const auto split = [&](auto x) {
      using X = decltype(x);
      return f(e, d, x, std::true_type{}, parts_of(scratch, heads, rows, X::ROWS, splits_of<X>(a), a->D));
    };
    if (splits_of<Medium>(a) > 1) return rows <= Narrow::ROWS ? split(Narrow{}) : split(Medium{});
    const Parts none = {1, (int)((rows + Wide::ROWS - 1) / Wide::ROWS), Wide::ROWS, nullptr, nullptr, nullptr};
    return f(e, d, Wide{}, std::false_type{}, none);
  });
}

int64_t kv_attend_cuda_scratch(const kv_attend *a) {
  Cutter scratch = {nullptr, 0};
  planned(a, scratch, [](auto, auto, auto, auto, const Parts &) { return 0; });
  return scratch.bytes;
}

int kv_attend_cuda(const kv_attend *a, void *memory, void *stream) {
  Cutter scratch = {memory, 0};
  return planned(a, scratch, [&](auto e, auto d, auto tile, auto split, const Parts &parts) {
    using E = decltype(e);
    using X = decltype(tile);
    const dim3 grid = grid_of((int64_t)parts.tiles * parts.splits, a->B * a->Hkv);
    const int error = launch<attend_kernel<E, decltype(d)::value, X, decltype(split)::value>>(
        grid, X::THREADS, X::SHARED + X::ROWS * sizeof(AttendRow), stream, *a, logits_of(a->scale, a->softcap), parts);
    if (error || !split) return error;
    return combine<E>(parts, {a->B, a->H, a->Hkv, a->T, a->D, a->sinks, a->out, a->lse, false}, stream);
  });
}
