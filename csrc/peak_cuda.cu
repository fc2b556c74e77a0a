/* Computes on a GPU each observing row's largest attention weight within a range of slots (peak), and the
 * log-sum-exp of the rows of a call that does not give it (lse_given). Both use sweep_kernel and combine_kernel.
 *
 * A block of sweep_kernel holds a tile of rows and goes over tiles of keys in one share of the columns: without
 * shares, the few observing rows would not fill a GPU. Each share gives one number a row; combine_kernel reduces
 * these numbers in the order of the shares. */
// budget: regs 255, smem 98304 (registers of a thread, bytes of a block)
#include "observe.cuh"

/* Returns the number of shares into which columns are cut, for about 512 blocks. It depends on the shape alone, so
 * results have the same bits every time. */
static int sweep_parts(const kv_observers *a) {
  const int64_t tiles = (a->R * (a->H / a->Hkv) + 63) / 64 * a->B * a->Hkv;
  return (int)(tiles > 256 ? 1 : tiles > 16 ? 512 / tiles : 32);
}

/* Computes parts [shares, B, H, R], a number for each row and share of the columns: log2 of the sum of 2^logit over
 * the columns that the row sees or, if PEAK, the largest logit - lse over the columns lo .. hi - 1 that it sees;
 * -inf if there is no such column. Logits and lse are in log2 units. blockIdx.x is share * row_tiles + tile of rows. */
template <class E, int D, bool PEAK>
static __global__ void __launch_bounds__(RowTile<E, D>::THREADS, 1)
    sweep_kernel(const kv_observers a, const Logits logits, const int32_t *lo, const int32_t *hi, const int shares,
                 float *parts) {
  using X = RowTile<E, D>;
  constexpr int MT = X::MT, NT = X::KEYS / 8;
  E *const q = shared_memory<E>(), *const k = q + X::ROWS * D;
  const int head = block_head();
  if (head >= a.B * a.Hkv) return;
  const Observed x = observed<E>(a, head);
  const Rows rows = {x.h * x.G, 0, (int)a.R * x.G, divisor(x.G)};
  const int row_tiles = gridDim.x / shares, share = blockIdx.x / row_tiles;
  const int row0 = (int)(blockIdx.x % row_tiles) * X::ROWS, row = row0 + warp_id() * MT * 16 + fragment_row();
  const int begin = PEAK ? lo[head] : 0, end = PEAK ? hi[head] : x.k.at.n;
  const int tiles = (max(end - begin, 0) + X::KEYS - 1) / X::KEYS;
  const int from = begin + (int)((int64_t)tiles * share / shares) * X::KEYS;
  const int to = min(min(end, begin + (int)((int64_t)tiles * (share + 1) / shares) * X::KEYS),
                     x.bounds.seen(rows.step(min(row0 + X::ROWS, rows.count) - 1)));

  int sees[MT][2];
  float lse[MT][2], top[MT][2], sum[MT][2] = {};
  each_row<MT>([&](int m, int half) {
    const int r = row + 16 * m + 8 * half;
    top[m][half] = -INFINITY;
    if (PEAK) {
      const RowValues values = row_values(a, x, rows, r);
      lse[m][half] = values.lse, sees[m][half] = min(values.seen, to);
    } else {
      sees[m][half] = r < rows.count ? min(x.bounds.seen(rows.step(r)), to) : 0;
    }
  });
  tile_load<E, D, X::ROWS, X::THREADS>(q, rows_at<E>(rows, a.q, x.b * a.q_stride[0], a.q_stride[1], a.q_stride[2]),
                                       row0, a.D);
  tile_load<E, D, X::KEYS, X::THREADS>(k, x.k, from, a.D);
  cp_async_commit();
#pragma unroll 1
  for (int c0 = from, stage = 0; c0 < to; c0 += X::KEYS, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads(); /* the tile is there; all warps have read the previous one */
    tile_load<E, D, X::KEYS, X::THREADS>(k + (stage ^ 1) * X::KEYS * D, x.k, c0 + X::KEYS, a.D);
    cp_async_commit();
    float s[MT][NT][4], alpha[MT][2];
    int seen[MT][2];
    each_row<MT>([&](int m, int half) { seen[m][half] = sees[m][half] - c0; });
    multiply<E, D, X::STEPS>(s, q, warp_id() * MT * 16, k + stage * X::KEYS * D);
    transform(s, logits);
    if constexpr (PEAK) {
      each_number<MT, NT>([&](int m, int n, int half, int j) {
        if (8 * n + fragment_column() + j < seen[m][half])
          top[m][half] = max_nan(top[m][half], fmaf(s[m][n][2 * half + j], logits.scale, -lse[m][half]));
      });
    } else {
      mask(s, seen);
      softmax_step(s, logits.scale, top, sum, alpha);
    }
  }
  cp_async_wait<0>(); /* waits for the copy past the last tile, which nobody reads */
  each_row<MT>([&](int m, int half) {
    const int r = row + 16 * m + 8 * half;
    const float all = PEAK ? row_max_nan(top[m][half]) : top[m][half] + log2f(lanes_sum<4>(sum[m][half]));
    if (r < rows.count && fragment_column() == 0)
      parts[((share * a.B + x.b) * a.H + rows.head_of(r)) * a.R + rows.step(r)] = all;
  });
}

/* Combines parts [shares, B, H, R] into out [B, H, R], which may be parts itself: each row's natural log-sum-exp,
 * including its sink, or, if PEAK, its largest attention weight. */
template <bool PEAK>
static __global__ void __launch_bounds__(256)
    combine_kernel(const kv_observers a, const int shares, const float *parts, float *out) {
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, rows = a.B * a.H * a.R;
  if (i >= rows) return;
  float most = -INFINITY, sum = 0;
  for (int p = 0; p < shares; p++) most = PEAK ? max_nan(most, parts[p * rows + i]) : fmaxf(most, parts[p * rows + i]);
  if (PEAK) {
    out[i] = exp2_approx(most);
    return;
  }
  const float sink = a.sinks ? a.sinks[i / a.R % a.H] * LOG2E : -INFINITY;
  most = fmaxf(most, sink);
  const float at = most == -INFINITY ? 0 : most;
  for (int p = 0; p < shares; p++) sum += exp2_approx(parts[p * rows + i] - at);
  out[i] = LN2 * (most + log2f(sum + exp2_approx(sink - at)));
}

template <bool PEAK>
static int sweep(const kv_observers *a, const int32_t *lo, const int32_t *hi, float *parts, float *out, void *stream) {
  const int shares = sweep_parts(a);
  const int64_t rows = a->B * a->H * a->R;
  const int error = dispatch(a->dtype, a->D, [&](auto e, auto d) {
    constexpr int D = decltype(d)::value;
    using X = RowTile<decltype(e), D>;
    const int64_t row_tiles = (a->R * (a->H / a->Hkv) + X::ROWS - 1) / X::ROWS;
    const dim3 grid = grid_of(row_tiles * shares, a->B * a->Hkv);
    return launch<sweep_kernel<decltype(e), D, PEAK>>(grid, X::THREADS, X::TILES, stream, *a,
                                                      logits_of(a->scale, a->softcap), lo, hi, shares, parts);
  });
  if (error) return error;
  return launch<combine_kernel<PEAK>>(dim3((rows + 255) / 256), 256, 0, stream, *a, shares, parts, out);
}

/* Returns the bytes of parts [shares, B, H, R]. */
static int64_t parts_bytes(const kv_observers *a) {
  return a->B * a->H * a->R == 0 ? 0 : sweep_parts(a) * a->B * a->H * a->R * (int64_t)sizeof(float);
}

int64_t lse_scratch(const kv_observers *a) { return a->lse ? 0 : parts_bytes(a); }

int lse_given(kv_observers *a, void *scratch, void *stream) {
  if (a->lse || a->B * a->H * a->R == 0) return 0;
  float *lse = static_cast<float *>(scratch);
  const int error = sweep<false>(a, nullptr, nullptr, lse, lse, stream);
  a->lse = lse, a->lse_stride[0] = a->H * a->R, a->lse_stride[1] = a->R;
  return error;
}

int64_t kv_peak_cuda_scratch(const kv_peak *a) { return lse_scratch(&a->rows) + parts_bytes(&a->rows); }

int kv_peak_cuda(const kv_peak *a, void *scratch, void *stream) {
  if (a->rows.B * a->rows.H * a->rows.R == 0) return 0;
  kv_observers rows = a->rows;
  rows.weight = nullptr;
  float *parts = reinterpret_cast<float *>(static_cast<char *>(scratch) + lse_scratch(&rows));
  const int error = lse_given(&rows, scratch, stream);
  return error ? error : sweep<true>(&rows, a->lo, a->hi, parts, a->out, stream);
}
