/* Computes the importance of every alive slot from observing rows on a GPU: a[r,i] = exp(logit[r,i] - lse[r])
 * reduced over rows.
 *
 * A block holds a tile of keys of one (batch row, kv head) in shared memory and goes over tiles of rows; the next
 * tile of rows is copied while S^T = K Q^T of this one is computed. Each lane sums its part of a key's row of S^T;
 * at the end the sums of the four lanes of a row are added. There are no atomics, so sums have the same order every
 * time. */
// budget: regs 255, smem 98304 (registers of a thread, bytes of a block of peak_cuda.cu, which computes a missing lse)
#include "score.cuh"

/* Sizes of a block's tiles. Shared memory has KEYS keys, two tiles of ROWS rows, and the rows' RowValues: at most 74
 * KiB. */
template <class E, int D>
struct ScoreTile {
  static constexpr bool HALF = sizeof(E) == 2;
  static constexpr int WARPS = !HALF && D == 256 ? 2 : 4, MT = HALF && D < 256 ? 2 : 1, KEYS = WARPS * MT * 16;
  static constexpr int ROWS = HALF ? (D < 256 ? 64 : 32) : D < 128 ? 64 : 4096 / D, THREADS = WARPS * 32;
  /* minimum blocks on a multiprocessor: leaves a thread 255 or 168 registers */
  static constexpr int BLOCKS = MT < 2 ? 1 : D == 96 ? 2 : 3;
  static constexpr size_t SHARED = (size_t)(KEYS + 2 * ROWS) * D * sizeof(E) + 2 * ROWS * sizeof(RowValues);
};

template <class E, int D>
static __global__ void __launch_bounds__(ScoreTile<E, D>::THREADS, ScoreTile<E, D>::BLOCKS)
    score_kernel(const kv_score a, const Logits logits, const float power) {
  using X = ScoreTile<E, D>;
  constexpr int MT = X::MT, NT = X::ROWS / 8;
  E *const k = shared_memory<E>(), *const q = k + X::KEYS * D;
  RowValues *const values = reinterpret_cast<RowValues *>(q + 2 * X::ROWS * D);
  const kv_observers &rows = a.rows;
  const int head = block_head();
  if (head >= rows.B * rows.Hkv) return;
  const Observed x = observed<E>(rows, head);
  const int c0 = blockIdx.x * X::KEYS, key = c0 + warp_id() * MT * 16 + fragment_row(), thread = threadIdx.x;
  const Rows all = seeing(a, x, c0);
  const int heads = all.heads.n, count = all.count;
  int seen = 0; /* how many keys the row that this thread loaded last sees */
  const auto load = [&](int stage, int g, int r0) {
    if (g == x.G || r0 >= count) return RowValues{};
    const Rows some = {all.head + g, all.from, count, all.heads};
    const RowsAt queries = rows_at<E>(some, rows.q, x.b * rows.q_stride[0], rows.q_stride[1], rows.q_stride[2]);
    tile_load<E, D, X::ROWS, X::THREADS>(q + stage * X::ROWS * D, queries, r0, rows.D);
    cp_async_commit();
    return thread < X::ROWS ? row_values(rows, x, some, r0 + thread) : RowValues{};
  };
  const auto keep = [&](int stage, const RowValues &row) {
    seen = row.seen;
    if (thread < X::ROWS) values[stage * X::ROWS + thread] = {row.lse * power, row.weight, row.seen};
  };

  if (count) tile_load<E, D, X::KEYS, X::THREADS>(k, x.k, c0, rows.D);
  keep(0, load(0, 0, 0));
  Group<MT> group;
  for (int g = 0, stage = 0; g < x.G; g += heads) {
    float total[MT][2] = {};
#pragma unroll 1
    for (int r0 = 0; r0 < count; r0 += X::ROWS, stage ^= 1) {
      cp_async_wait<0>();
      /* The tile is there; all warps have read the previous one. */
      const bool full = __syncthreads_and(thread >= X::ROWS || seen >= c0 + X::KEYS), last = r0 + X::ROWS >= count;
      const RowValues next = load(stage ^ 1, last ? g + heads : g, last ? 0 : r0 + X::ROWS);
      const RowValues *now = values + stage * X::ROWS;
      float s[MT][NT][4];
      multiply<E, D, D / 16>(s, k, warp_id() * MT * 16, q + stage * X::ROWS * D);
      add_tile(a, total, s, now, logits, key, full);
      keep(stage ^ 1, next);
    }
    add_heads(a, x, group, total, head, g, heads, c0 + warp_id() * MT * 16);
  }
}

int64_t kv_score_cuda_scratch(const kv_score *a) { return lse_scratch(&a->rows); }

int kv_score_cuda(const kv_score *a, void *scratch, void *stream) {
  const int64_t heads = a->rows.B * a->rows.Hkv;
  if (heads == 0 || a->C == 0) return 0;
  kv_score x = *a;
  const int error = lse_given(&x.rows, scratch, stream);
  if (error) return error;
  const float power = x.term == KV_SQUARE ? 2 : 1;
  Logits logits = logits_of(x.rows.scale, x.rows.softcap);
  logits.scale *= power;
  const int done = score_sm90(x, logits, power, stream);
  if (done >= 0) return done;
  return dispatch(x.rows.dtype, x.rows.D, [&](auto e, auto d) {
    constexpr int D = decltype(d)::value;
    using X = ScoreTile<decltype(e), D>;
    const dim3 grid = grid_of((x.C + X::KEYS - 1) / X::KEYS, heads);
    return launch<score_kernel<decltype(e), D>>(grid, X::THREADS, X::SHARED, stream, x, logits, power);
  });
}
