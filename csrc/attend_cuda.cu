/* Chunk attention over [stored | new] on a GPU, sm_80 and up.
 *
 * A block computes one tile of rows of one (b, kv head), the rows of its G query heads in time-major order, against
 * tiles of keys in ascending order. Q, one tile of K and one of V are in shared memory, S and O in registers: V is
 * copied while S = Q K^T is computed, the next K during the softmax and O += P V. Only tiles on the diagonal are
 * masked; tiles that no row sees are not read. */
// budget: regs 255, smem 99328
#include "attention.cuh"

/* A row's bounds and place, kept in shared memory: registers are scarce. */
struct alignas(16) AttendRow {
  int seen, step, head;
};

/* Writes out and lse of a lane's rows. */
template <class E, int D, int MT>
static __device__ __forceinline__ void attend_finish(const kv_attend &a, const float (&o)[MT][D / 8][4],
                                                     const float (&top)[MT][2], const float (&sum)[MT][2], int b,
                                                     const AttendRow *rows) {
  each_row<MT>([&](int m, int half) {
    const int t = rows[16 * m + 8 * half].step, head = rows[16 * m + 8 * half].head;
    float l = lanes_sum<4>(sum[m][half]), at = top[m][half], over = 1;
    if (t >= a.T) return;
    if (a.sinks) { /* one more logit, without a value */
      const float sink = a.sinks[head] * LOG2E, most = fmaxf(at, sink);
      over = most == -INFINITY ? 1 : exp2_approx(at - most);
      l = most == -INFINITY ? l : l * over + exp2_approx(sink - most);
      at = most;
    }
    over = l == 0 ? 0 : over / l;
    E *out = static_cast<E *>(a.out) + ((b * a.T + t) * a.H + head) * a.D;
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      const int column = d * 8 + fragment_column();
      const float x = o[m][d][2 * half] * over, y = o[m][d][2 * half + 1] * over;
      if (column >= a.D) continue;
      if constexpr (sizeof(E) == 4)
        *reinterpret_cast<float2 *>(out + column) = make_float2(x, y);
      else
        *reinterpret_cast<uint32_t *>(out + column) = pack<E>(x, y);
    }
    if (fragment_column() == 0) a.lse[(b * a.H + head) * a.T + t] = LN2 * (at + log2f(l));
  });
}

template <class E, int D>
static __global__ void __launch_bounds__(RowTile<E, D>::THREADS, 1)
    attend_kernel(const kv_attend a, const Logits logits) {
  using X = RowTile<E, D>;
  constexpr int MT = X::MT, NT = X::KEYS / 8;
  E *const q = shared_memory<E>(), *const k = q + X::ROWS * D, *const v = k + X::KEYS * D;
  AttendRow *const known = reinterpret_cast<AttendRow *>(v + X::KEYS * D), *const mine = known + warp_id() * MT * 16 +
                                                                                         fragment_row();
  const int kv_head = block_head();
  if (kv_head >= a.B * a.Hkv) return;
  const int b = kv_head / a.Hkv, h = kv_head % a.Hkv, G = a.H / a.Hkv, dims = a.D;
  const int thread = threadIdx.x;
  const int stop = a.stop ? a.stop[b] : (int)a.S;
  const kv_segments keys = kv_keys_of(&a.slots, &a.chunk, b, h, a.Hkv, stop, dims, sizeof(E));
  const kv_segments values = kv_values_of(&a.slots, &a.chunk, b, h, a.Hkv, stop, dims, sizeof(E));
  const Rows rows = {h * G, 0, (int)a.T * G, divisor(G)};
  const Bounds bounds = {(int)(keys.len - a.chunk.first[b] + a.S - a.T), a.stop ? keys.n : keys.len, keys.n};

  /* The last rows see most: they start first. */
  const int row0 = (gridDim.x - 1 - blockIdx.x) * X::ROWS;
  const int fewest = bounds.seen(rows.step(row0)), most = bounds.seen(rows.step(min(row0 + X::ROWS, rows.count) - 1));
  if (thread < X::ROWS) {
    const int r = row0 + thread;
    known[thread] = {r < rows.count ? bounds.seen(rows.step(r)) : 0, rows.step(r), rows.head_of(r)};
  }
  float o[MT][D / 8][4] = {}, top[MT][2], sum[MT][2] = {};
  each_row<MT>([&](int m, int half) { top[m][half] = -INFINITY; });
  tile_load<E, D, X::ROWS, X::THREADS>(q, rows_at<E>(rows, a.q, b * a.q_stride[0], a.q_stride[1], a.q_stride[2]), row0,
                                       dims);
  tile_load<E, D, X::KEYS, X::THREADS>(k, keys, 0, dims);
  cp_async_commit();
#pragma unroll 1
  for (int c0 = 0; c0 < most; c0 += X::KEYS) {
    const bool masked = c0 + X::KEYS > fewest;
    cp_async_wait<0>();
    __syncthreads(); /* K is there; V of the tile before has been read */
    tile_load<E, D, X::KEYS, X::THREADS>(v, values, c0, dims);
    cp_async_commit();
    float s[MT][NT][4], alpha[MT][2];
    multiply<E, D, X::STEPS>(s, q, warp_id() * MT * 16, k);
    cp_async_wait<0>();
    /* V is there; K has been read */
    const bool finite = __syncthreads_and(sizeof(E) == 4 || !masked || tile_finite<E, D, X::KEYS, X::THREADS>(v));
    tile_load<E, D, X::KEYS, X::THREADS>(k, keys, c0 + X::KEYS, dims);
    cp_async_commit();
    int seen[MT][2]; /* read just before use: registers are scarce */
    const auto read_seen = [&] {
      each_row<MT>([&](int m, int half) { seen[m][half] = mine[16 * m + 8 * half].seen - c0; });
    };
    transform(s, logits);
    if (masked) read_seen(), mask(s, seen);
    softmax_step(s, logits.scale, top, sum, alpha);
    bool moved = false; /* most tiles leave the maxima where they are */
    each_row<MT>([&](int m, int half) { moved |= alpha[m][half] != 1; });
    if (__any_sync(ALL_LANES, moved))
      each_number<MT, D / 8>([&](int m, int d, int half, int j) { o[m][d][2 * half + j] *= alpha[m][half]; });
    if constexpr (sizeof(E) == 4) {
      read_seen();
      add_values_seen<D>(o, s, v, seen);
    } else {
      if (!finite) read_seen(), move_nonfinite<E, D, X::KEYS, X::THREADS>(o, v, seen);
      add_values<E, D>(o, s, v);
    }
  }
  cp_async_wait<0>(); /* the copy of Q, where the rows see no key */
  __syncthreads();    /* and the rows' AttendRow */
  attend_finish<E, D>(a, o, top, sum, b, mine);
}

int64_t kv_attend_cuda_scratch(const kv_attend *) { return 0; }

int kv_attend_cuda(const kv_attend *a, void *, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0 || a->T == 0) return 0;
  return dispatch(a->dtype, a->D, [&](auto e, auto d) {
    constexpr int D = decltype(d)::value;
    using X = RowTile<decltype(e), D>;
    const int64_t tiles = (a->T * (a->H / a->Hkv) + X::ROWS - 1) / X::ROWS;
    return launch<attend_kernel<decltype(e), D>>(grid_of(tiles, heads), X::THREADS,
                                                 X::SHARED + X::ROWS * sizeof(AttendRow), stream, *a,
                                                 logits_of(a->scale, a->softcap));
  });
}
