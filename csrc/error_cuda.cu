/* Computes the error of the observing rows' attention outputs when one alive slot is removed (kv_error), on a GPU.
 *
 * As in score_cuda.cu, a block holds a tile of keys in shared memory, here with their values, and goes over tiles of
 * rows. KV_EDIE, KV_L1 and KV_L2 are the error measures of kvevict.h. KV_EDIE also needs the norms of values and
 * outputs. For the other two the differences of each value v and output o are summed with multiply-adds, since
 * ||v||^2 - 2 v.o + ||o||^2 would cancel. */
// budget: regs 255, smem 99840 (registers of a thread, bytes of a block)
#include "observe.cuh"

/* Sizes of a block's tiles. Shared memory holds KEYS keys and values, ROWS queries and outputs, the norms of values
 * and outputs, and the rows' RowValues: at most 98 KiB. */
template <class E, int D>
struct ErrorTile {
  static constexpr bool HALF = sizeof(E) == 2;
  static constexpr int WARPS = !HALF && D == 256 ? 2 : 4, KEYS = WARPS * 16, THREADS = WARPS * 32;
  static constexpr int ROWS = HALF ? (D < 256 ? 64 : 32) : D < 128 ? 64 : 4096 / D;
  static constexpr size_t SHARED =
      (size_t)2 * (KEYS + ROWS) * D * sizeof(E) + ROWS * sizeof(RowValues) + (KEYS + ROWS) * sizeof(float);
};

/* norm [ROWS] = the 1-norms of a tile's rows; four lanes share a row. */
template <class E, int D, int ROWS, int THREADS>
KV_DEVICE void row_norms(const E *tile, float *norm) {
  for (int r = threadIdx.x / 4; r < ROWS; r += THREADS / 4) {
    float sum = 0;
    for (int c = threadIdx.x % 4; c < D / VECTOR<E>; c += 4) {
      float x[VECTOR<E>];
      tile_floats(tile + tile_at<E, D>(r, c), x);
      for (int j = 0; j < VECTOR<E>; j++) sum += fabsf(x[j]);
    }
    sum = lanes_sum<4>(sum);
    if (threadIdx.x % 4 == 0) norm[r] = sum;
  }
}

/* Adds to each key's total the terms (kv_error) of a tile's rows. size: ||v - o|| of each pair or, for KV_EDIE,
 * ||v||_1 + ||o||_1. all: 1 or, for KV_EDIE, 1 + alpha. key: the thread's first key. Rows that do not see a key add
 * nothing to its total, even if its value's norm is not finite. */
template <int NT>
KV_DEVICE void add_errors(float (&total)[1][2], const float (&s)[1][NT][4], const float (&size)[1][NT][4],
                          const RowValues *values, float scale, float all, int key) {
  float sum[2] = {};
  unrolled<NT, 2>([&](int n, int j) {
    const RowValues row = values[8 * n + fragment_column() + j];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float p = exp2_approx(fmaf(s[0][n][2 * half + j], scale, -row.lse));
      const float term = row.weight * size[0][n][2 * half + j] * p / fmaxf(all - p, 1e-6f);
      if (key + 8 * half < row.seen) sum[half] += term;
    }
  });
  total[0][0] += sum[0], total[0][1] += sum[1];
}

template <class E, int D>
static __global__ void __launch_bounds__(ErrorTile<E, D>::THREADS, 1)
    error_kernel(const kv_error a, const Logits logits) {
  using X = ErrorTile<E, D>;
  constexpr int NT = X::ROWS / 8;
  E *const k = shared_memory<E>(), *const v = k + X::KEYS * D, *const q = v + X::KEYS * D, *const o = q + X::ROWS * D;
  RowValues *const values = reinterpret_cast<RowValues *>(o + X::ROWS * D);
  float *const v_norm = reinterpret_cast<float *>(values + X::ROWS), *const o_norm = v_norm + X::KEYS;
  const kv_observers &rows = a.rows;
  const int head = block_head();
  if (head >= rows.B * rows.Hkv) return;
  const Observed x = observed<E>(rows, head);
  const Columns v_columns =
      head_columns<E>(KV_VALUES, rows.slots, rows.chunk, x.b, x.h, rows.Hkv, rows.stop[x.b], rows.D);
  const int c0 = blockIdx.x * X::KEYS, at = warp_id() * 16, key = at + fragment_row(), thread = threadIdx.x;
  const int heads = heads_together(KV_SUM, a.group, x.G);
  /* first step whose row sees a key of this block */
  const int from = max(x.row_first, rows.causal ? c0 - x.bounds.shift : 0);
  const int count = c0 < x.k.at.n && from < rows.R ? ((int)rows.R - from) * heads : 0;
  if (count) {
    tile_load<E, D, X::KEYS, X::THREADS>(k, x.k, c0, rows.D);
    tile_load<E, D, X::KEYS, X::THREADS>(v, v_columns, c0, rows.D);
  }

  Group<1> group;
  for (int g = 0; g < x.G; g += heads) {
    float total[1][2] = {};
    const Rows some = {x.h * x.G + g, from, count, divisor(heads)};
#pragma unroll 1
    for (int r0 = 0; r0 < count; r0 += X::ROWS) {
      __syncthreads(); /* all warps have read the previous tile */
      const RowsAt queries = rows_at<E>(some, rows.q, x.b * rows.q_stride[0], rows.q_stride[1], rows.q_stride[2]);
      tile_load<E, D, X::ROWS, X::THREADS>(q, queries, r0, rows.D);
      tile_load<E, D, X::ROWS, X::THREADS>(o, rows_at<E>(some, a.o, x.b * a.o_stride[0], a.o_stride[2], a.o_stride[1]),
                                           r0, rows.D);
      cp_async_commit();
      if (thread < X::ROWS) values[thread] = row_values(rows, x, some, r0 + thread);
      cp_async_wait<0>();
      __syncthreads(); /* the tile has arrived */
      float s[1][NT][4], size[1][NT][4];
      if (a.kind == KV_EDIE) {
        if (g == 0 && r0 == 0) row_norms<E, D, X::KEYS, X::THREADS>(v, v_norm);
        row_norms<E, D, X::ROWS, X::THREADS>(o, o_norm);
        __syncthreads(); /* all threads have written their norms */
        each_number<1, NT>([&](int, int n, int half, int j) {
          size[0][n][2 * half + j] = v_norm[key + 8 * half] + o_norm[8 * n + fragment_column() + j];
        });
      } else if (a.kind == KV_L1) {
        pair_rows<L1, E, D>(size, v, at, o);
      } else {
        pair_rows<L2, E, D>(size, v, at, o);
        each_number<1, NT>(
            [&](int, int n, int half, int j) { size[0][n][2 * half + j] = sqrtf(size[0][n][2 * half + j]); });
      }
      multiply<E, D, D / 16>(s, k, at, q);
      transform(s, logits);
      add_errors(total, s, size, values, logits.scale, a.kind == KV_EDIE ? 1 + a.alpha : 1, c0 + key);
    }
    total[0][0] = lanes_sum<4>(total[0][0]), total[0][1] = lanes_sum<4>(total[0][1]);
    group.add(total, a.group, g, heads, x.G, 1, group_out(a.out, head, x.G, a.group, a.C), a.C, c0 + at);
  }
}

int64_t kv_error_cuda_scratch(const kv_error *a) { return lse_scratch(&a->rows); }

int kv_error_cuda(const kv_error *a, void *scratch, void *stream) {
  const int64_t heads = a->rows.B * a->rows.Hkv;
  if (heads == 0 || a->C == 0) return 0;
  kv_error x = *a;
  const int error = lse_given(&x.rows, scratch, stream);
  if (error) return error;
  return dispatch(x.rows.dtype, x.rows.D, [&](auto e, auto d) {
    constexpr int D = decltype(d)::value;
    using X = ErrorTile<decltype(e), D>;
    const dim3 grid = grid_of((x.C + X::KEYS - 1) / X::KEYS, heads);
    return launch<error_kernel<decltype(e), D>>(grid, X::THREADS, X::SHARED, stream, x,
                                                logits_of(x.rows.scale, x.rows.softcap));
  });
}
