/* One decode step on a GPU. Limited by memory bandwidth, so a block reads each row once for all heads of its group. The
 * slots of a head are cut into splits that depend only on the number of slots and heads, and are combined in order: the
 * same bits every time.
 *
 * In 16 bits warps go through their own tiles and multiply them on tensor cores (ring.cuh), except one or two heads a
 * group of slots as computed: those are computed by lanes (lanes.cuh), as are up to 4 in fp32, and whichever block
 * finishes a head's last split combines all of them. More heads in fp32 are the rows of a tile (stream.cuh). Splits of
 * rings and tiles are combined by another kernel.
 * Arithmetic is fp32, logits are in log2 units. */
// budget: regs 255, smem 98400
#include "lanes.cuh"
#include "ring.cuh"

constexpr int STEP = 64;     /* a split's slots are a multiple of this; a tile's, of its keys */
constexpr int BLOCKS = 4096; /* splits of all heads, about at most: more would not keep a GPU busier */

/* Heads of a group that lanes compute, or none: packed rows in 16 bits. */
static constexpr int most_lanes(bool is_16_bits, bool is_packed) { return !is_16_bits ? 4 : is_packed ? 0 : 2; }

static bool is_packed(const kv_decode &a) {
  return a.slots.k_kind != KV_AS_COMPUTED || a.slots.v_kind != KV_AS_COMPUTED;
}

struct Scratch {
  Parts parts;  /* count: with lanes the blocks that are done, 0 at first */
  float *logit; /* [B, Hkv, G, C], or NULL */
};

/* tile: the heads of a tile. */
static Scratch scratch_of(const kv_decode *a, int64_t tile, Cutter &scratch) {
  const int64_t heads = a->B * a->Hkv, whole = (a->rows_prefix + a->rows + 2 * STEP - 1) / (2 * STEP);
  int64_t splits = heads > BLOCKS / MOST_SPLITS ? BLOCKS / heads : MOST_SPLITS;
  if (splits > whole) splits = whole;
  const int64_t least = a->prefix.len ? 2 : 1;
  if (splits < least) splits = least;
  const Parts parts = parts_of(scratch, heads, a->H / a->Hkv, tile, splits, a->D);
  return {parts, a->probs ? scratch.take<float>(a->B * a->H * a->C) : nullptr};
}

/* Slots of a head in the prefix. */
static __device__ __forceinline__ int prefix_len(const kv_decode &a, int64_t head) {
  return a.prefix.len ? a.prefix.len[head] : 0;
}

/* How a head's slots are cut: no split has slots of the prefix and of the head, so there may be one more. */
struct Cut {
  int size, before, splits; /* slots of a split; splits of the prefix, and of all */
};

template <int KEYS>
static __device__ __forceinline__ Cut cut_of(const kv_decode &a, const Parts &x, int64_t head, int least = 2 * KEYS) {
  const int shared_len = prefix_len(a, head), len = a.slots.len[head];
  const int size = split_size<KEYS>(shared_len + len + 1, x.splits - (a.prefix.len ? 1 : 0), least);
  const int before = (shared_len + size - 1) / size;
  return {size, before, before + (len + size) / size};
}

/* One split: slots c0 .. c1 - 1 of the prefix or of the head itself; the new row is the last of these. */
template <class E>
struct Split {
  Columns k, v;
  int64_t new_row; /* where the new row is stored */
  const E *new_k, *new_v;
  int c0, c1;
  bool own, last;
};

/* n - 1 rows of `stored`, from `offset` on, and the new row, addressed as slot n - 1 with the stored rows' stride;
 * where rows are packed it is stored before it is read. at: as of split_of. */
template <class E>
static __device__ __forceinline__ Columns slots_of(const void *stored, int64_t offset, const E *chunk, int n, int at,
                                                   kv_kind kind, const float *centre, int D) {
  const int stride = D * (int)sizeof(E);
  const E *const rows = static_cast<const E *>(stored) + offset * D + at;
  const bool packed = kind != KV_AS_COMPUTED;
  return columns_of(
      {(uint64_t)rows, (uint64_t)(chunk + at) - (uint64_t)(n - 1) * stride, stride, stride, packed ? n : n - 1, n},
      stored, offset, kind, centre, D);
}

/* at: the element of a row as computed that the columns' addresses begin with. */
template <class E>
static __device__ __forceinline__ Split<E> split_of(const kv_decode &a, const Cut &cut, int64_t head, int split,
                                                    int at) {
  const int b = (int)head / (int)a.Hkv, h = (int)head % (int)a.Hkv;
  const int64_t *ks = a.chunk.k_stride, *vs = a.chunk.v_stride;
  const bool own = split >= cut.before;
  const int D = (int)a.D, len = a.slots.len[head], end = own ? len + 1 : prefix_len(a, head);
  const int c0 = (own ? split - cut.before : split) * cut.size, c1 = min(end, c0 + cut.size);
  const int most = own ? len + 1 : INT32_MAX;
  const int64_t offset = (own ? a.slots.offset : a.prefix.offset)[head];
  const E *const new_k = static_cast<const E *>(a.chunk.k) + b * ks[0] + h * ks[1];
  const E *const new_v = static_cast<const E *>(a.chunk.v) + b * vs[0] + h * vs[1];
  return {
      slots_of(own ? a.slots.k : a.prefix.k, offset, new_k, most, at, a.slots.k_kind, centre_of(a.slots, head, D), D),
      slots_of(own ? a.slots.v : a.prefix.v, offset, new_v, most, at, a.slots.v_kind, nullptr, D),
      offset + len,
      new_k,
      new_v,
      c0,
      c1,
      own,
      own && c1 == end};
}

/* Writes the head's new row after its slots, except where it is packed. */
template <class E>
static __device__ __forceinline__ void append(const kv_decode &a, int64_t head, const Split<E> &x) {
  const int d = threadIdx.x * VECTOR<E>;
  if (d < a.D) {
    const int64_t at = x.new_row * a.D + d;
    if (a.slots.k_kind == KV_AS_COMPUTED)
      *reinterpret_cast<uint4 *>(static_cast<E *>(a.slots.k) + at) = *reinterpret_cast<const uint4 *>(x.new_k + d);
    if (a.slots.v_kind == KV_AS_COMPUTED)
      *reinterpret_cast<uint4 *>(static_cast<E *>(a.slots.v) + at) = *reinterpret_cast<const uint4 *>(x.new_v + d);
  }
  if (threadIdx.x == 0) a.slots.pos[x.new_row] = a.chunk.pos[head / a.Hkv];
}

/* Packs a head's new key or value as row `row`, by one warp. */
template <class E>
static __device__ __forceinline__ void append_packed(const kv_decode &a, int64_t head, int64_t row, bool keys) {
  const int b = (int)head / (int)a.Hkv, h = (int)head % (int)a.Hkv;
  const kv_kind kind = keys ? a.slots.k_kind : a.slots.v_kind;
  const int64_t *stride = keys ? a.chunk.k_stride : a.chunk.v_stride;
  if (kind == KV_AS_COMPUTED) return;
  pack_row(static_cast<const E *>(keys ? a.chunk.k : a.chunk.v) + b * stride[0] + h * stride[1], kind,
           keys ? centre_of(a.slots, head, a.D) : nullptr, (int)a.D,
           static_cast<unsigned char *>(keys ? a.slots.k : a.slots.v) + row * kv_packed_bytes(kind, a.D));
}

/* Packs the new rows of fp32 before other kernels read them: a warp has the key or the value of a head, blockIdx.x. */
static __global__ void __launch_bounds__(64) append_kernel(const kv_decode a) {
  append_packed<float>(a, blockIdx.x, a.slots.offset[blockIdx.x] + a.slots.len[blockIdx.x], warp_id() == 0);
}

/* HEADS heads a group; PACKED: keys, values or both are packed. Asked for two blocks an SM, ptxas does not spill
 * registers to make room for four. */
template <class E, int L, int V, int HEADS, bool PACKED>
static __global__ void __launch_bounds__(THREADS, 2)
    lanes_kernel(const kv_decode a, const Scratch x, const Logits logits) {
  using R = HeadRows<E, L, V, HEADS, PACKED>;
  const int64_t head = blockIdx.x, b = head / a.Hkv, h = head % a.Hkv;
  const int D = (int)a.D;
  const Cut cut = cut_of<STEP>(a, x.parts, head);
  float *shared = shared_memory<float>() + 4;
  for (int split = blockIdx.y; split < cut.splits; split += gridDim.y) {
    const Split<E> s = split_of<E>(a, cut, head, split, R::element(0));
    if (s.last) append(a, head, s);
    const int64_t at = (head * x.parts.splits + split) * HEADS;
    float *logit = x.logit ? x.logit + head * HEADS * a.C + (s.own ? prefix_len(a, head) : 0) : nullptr;
    const E *query = static_cast<const E *>(a.q) + b * a.q_stride[0] + h * HEADS * a.q_stride[1];
    R rows;
    rows.start(query, a.q_stride[1], D, logits.of_query(), s.k);
    rows.attend(s.k, s.v, s.c0, s.c1, D, logits, logit, a.C);
    rows.merge(shared, D, x.parts.o + at * D, x.parts.states + at);
    if (!block_is_last(x.parts.count + head, cut.splits, shared_memory<uint32_t>())) continue;
    for (int g = warp_id(); g < HEADS; g += THREADS / 32) {
      const int64_t from = head * x.parts.splits * HEADS + g, to = b * a.H + h * HEADS + g;
      const float sink = a.sinks ? a.sinks[h * HEADS + g] * LOG2E : -INFINITY;
      finish<E>(x.parts.o + from * D, HEADS * D, x.parts.states + from, HEADS, cut.splits, D, sink,
                static_cast<E *>(a.out) + to * D, a.lse + to);
    }
  }
}

/* In 16 bits: how a launch cuts the heads' slots, and what it holds in shared memory. */
struct Plan {
  Ring ring;
  int least, blocks, shared; /* the slots of a split, if no head has too many for that */
  bool whole;                /* few slots, no head is cut: its block writes the results, from shared memory, at `out` */
  int out;
};

/* Split `split` of a head; head is the number of heads where there is none. */
struct Place {
  int head, split;
};

/* The n-th split of all heads'; by a warp. */
template <int KEYS>
static __device__ __forceinline__ Place place_of(const kv_decode &a, const Parts &x, int least, int n) {
  const int heads = (int)(a.B * a.Hkv);
  for (int first = 0; first < heads; first += 32) {
    const int head = first + lane_id();
    const int splits = head < heads ? cut_of<KEYS>(a, x, head, least).splits : 0, before = lanes_sum_before(splits);
    const uint32_t its = __ballot_sync(ALL_LANES, n >= before && n < before + splits);
    if (its) return {first + __popc(its - 1), n - __shfl_sync(ALL_LANES, before, __popc(its - 1))};
    n -= __shfl_sync(ALL_LANES, before + splits, 31);
  }
  return {heads, 0};
}

/* Block i has the i-th split of all heads' splits; where these are more than blocks it has others as well. */
template <class E, int D, int ROWS, bool PACKED>
static __global__ void __launch_bounds__(RingHeads<E, D, ROWS, PACKED>::MOST_WARPS * 32, PACKED &&ROWS == 16 ? 2 : 3)
    ring_kernel(const kv_decode a, const Scratch x, const Plan plan, const Logits logits) {
  using R = RingHeads<E, D, ROWS, PACKED>;
  const int heads = (int)(a.B * a.Hkv), G = (int)a.H / (int)a.Hkv, tiles = x.parts.tiles;
  R::clear();
  await_kernels_before();
  start_next_kernel();
  for (int unit = blockIdx.x;; unit += gridDim.x) {
    const Place place = place_of<R::KEYS>(a, x.parts, plan.least, unit / tiles);
    if (place.head == heads) return;
    __syncthreads(); /* the unit before is done with shared memory */
    const int head = place.head, split = place.split, tile = unit % tiles, g = tile * ROWS;
    const int b = head / (int)a.Hkv, h = head % (int)a.Hkv, rows = min(G - g, ROWS);
    const Cut cut = cut_of<R::KEYS>(a, x.parts, head, plan.least);
    const Split<E> s = split_of<E>(a, cut, head, split, 0);
    const auto pack = [&] {
      for (int i = warp_id(); i < 2; i += blockDim.x / 32) append_packed<E>(a, head, s.new_row, i == 0);
    };
    float *const logit =
        x.logit ? x.logit + ((int64_t)head * G + g) * a.C + (s.own ? prefix_len(a, head) : 0) : nullptr;
    const auto keep = [&](const auto &p, int c) {
      if (!logit) return;
      R::each([&](int n, int i) {
        const int column = c + R::key(n, i % 2), r = R::head(i / 2);
        if (column < s.c1 && r < rows) logit[r * a.C + column] = p[n][i];
      });
    };
    R done;
    done.attend(plan.ring, static_cast<const E *>(a.q) + b * a.q_stride[0] + (h * G + g) * a.q_stride[1], a.q_stride[1],
                rows, s.k, s.v, s.c0, s.c1, s.c1 - s.last, (int)a.D, logits, pack, keep);
    if (s.last && g == 0) append(a, head, s);
    const int64_t from = ((int64_t)head * tiles + tile) * x.parts.splits * x.parts.rows,
                  at = from + split * x.parts.rows;
    if (!plan.whole) {
      if (split == 0 && threadIdx.x == 0) x.parts.count[head * tiles + tile] = cut.splits;
      done.merge(rows, (int)a.D, x.parts.o + at * a.D, x.parts.states + at);
      continue;
    }
    float *const o = shared_memory<float>() + plan.out / 4;
    kv_state *const states = reinterpret_cast<kv_state *>(o + rows * a.D);
    done.merge(rows, (int)a.D, o, states);
    __syncthreads(); /* the rows are there */
    for (int r = warp_id(); r < rows; r += blockDim.x / 32) {
      const int query_head = h * G + g + r, to = b * (int)a.H + query_head;
      finish<E>(o + r * a.D, 0, states + r, 0, 1, (int)a.D, a.sinks ? a.sinks[query_head] * LOG2E : -INFINITY,
                static_cast<E *>(a.out) + (int64_t)to * a.D, a.lse + to, a.slots.v_kind == KV_INT4);
    }
  }
}

/* More heads a group: blockIdx.z is the tile of them, blockIdx.y the split. */
template <class E, int D, class X>
static __global__ void __launch_bounds__(X::THREADS, 1)
    tiles_kernel(const kv_decode a, const Scratch x, const Logits logits) {
  E *const q = shared_memory<E>();
  const int head = blockIdx.x, split = blockIdx.y, unit = head * x.parts.tiles + blockIdx.z;
  const int b = head / (int)a.Hkv, h = head % (int)a.Hkv, G = (int)(a.H / a.Hkv), g = blockIdx.z * X::ROWS;
  const Cut cut = cut_of<X::KEYS>(a, x.parts, head);
  if (split >= cut.splits) return;
  if (split == 0 && threadIdx.x == 0) x.parts.count[unit] = cut.splits;
  const Split<E> s = split_of<E>(a, cut, head, split, 0);
  if (s.last && g == 0) append(a, head, s);

  const int stride = (int)a.q_stride[1] * (int)sizeof(E), rows = min(G - g, X::ROWS), count = s.c1 - s.c0;
  const E *query = static_cast<const E *>(a.q) + b * a.q_stride[0] + (h * G + g) * a.q_stride[1];
  const kv_segments queries = {(uint64_t)query, 0, stride, 0, rows, rows};
  const int first = s.c0 + (s.own ? prefix_len(a, head) : 0);
  const auto keep = [&](const auto &products, int c) {
    if (!x.logit) return;
    float *const logit = x.logit + ((int64_t)head * G + g) * a.C + first + c;
    each_number<X::MT, X::KEYS / X::KEY_WARPS / 8>([&](int m, int n, int half, int j) {
      const int r = warp_row<X>() + 16 * m + 8 * half + fragment_row(), column = 8 * n + fragment_column() + j;
      if (r < rows && c + column < count) logit[r * a.C + column] = logits.scale * products[m][n][2 * half + j];
    });
  };
  Attended<X::MT, D> done;
  attend_columns<E, D, X, true>(
      done, q, queries, 0, between(s.k, s.c0, s.c1), between(s.v, s.c0, s.c1), count, (int)a.D, logits,
      [&](int, int) { return count; }, keep);
  const int64_t at = ((int64_t)unit * x.parts.splits + split) * x.parts.rows;
  put_part<E, D, X>(done, q, x.parts.rows, (int)a.D, x.parts.o + at * a.D, x.parts.states + at);
}

/* Column c of a head's probs: the mean of its query heads' exp(logit - lse). */
static __global__ void __launch_bounds__(THREADS) probs_kernel(const kv_decode a, const float *logit) {
  const int64_t head = block_head(), G = a.H / a.Hkv, c = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (head >= a.B * a.Hkv || c >= a.C) return;
  float p = 0;
  for (int64_t g = 0; c <= prefix_len(a, head) + a.slots.len[head] && g < G; g++) {
    const float lse = a.lse[head * G + g] * LOG2E;
    p += exp2_approx(logit[(head * G + g) * a.C + c] - (lse == -INFINITY ? 0 : lse));
  }
  a.probs[head * a.C + c] = p / (float)G;
}

template <class E, int L, int V, int HEADS>
static int run(const kv_decode *a, const Scratch &x, void *stream) {
  const int64_t heads = a->B * a->Hkv,
                mean = (a->rows_prefix + a->rows) / (heads * 2 * STEP) + 1;     /* splits of a head */
  const int64_t blocks = 4 * mean < x.parts.splits ? 4 * mean : x.parts.splits; /* a longer head's take several */
  const dim3 grid((unsigned)heads, (unsigned)blocks);
  const auto shared = (size_t)HeadRows<E, L, V, HEADS, false>::shared_bytes(a->D);
  const Logits logits = logits_of(a->scale, a->softcap);
  if constexpr (HEADS <= most_lanes(sizeof(E) == 2, false))
    if (!is_packed(*a))
      return launch<lanes_kernel<E, L, V, HEADS, false>>(grid, THREADS, shared, stream, *a, x, logits);
  if constexpr (HEADS <= most_lanes(sizeof(E) == 2, true))
    return launch<lanes_kernel<E, L, V, HEADS, true>>(grid, THREADS, shared, stream, *a, x, logits);
  return 0; /* 16 bits: run_ring */
}

template <class E, int HEADS>
static int run_width(const kv_decode *a, const Scratch &x, void *stream) {
  return with_lanes<E>(
      a->D, [&](auto l, auto v) { return run<E, decltype(l)::value, decltype(v)::value, HEADS>(a, x, stream); });
}

static int run_lanes(const kv_decode *a, const Scratch &x, void *stream) {
  const int64_t G = a->H / a->Hkv, heads = a->B * a->Hkv;
  const int error = (int)cudaMemsetAsync(x.parts.count, 0, heads * sizeof *x.parts.count, (cudaStream_t)stream);
  if (error) return error;
  return dispatch(a->dtype, [&](auto e) {
    using E = decltype(e);
    if (G == 1) return run_width<E, 1>(a, x, stream);
    if (G == 2) return run_width<E, 2>(a, x, stream);
    return G == 3 ? run_width<E, 3>(a, x, stream) : run_width<E, 4>(a, x, stream);
  });
}

/* Of `wanted` splits of a mean head the number that keeps a GPU's `slots` for blocks busiest, each split costing as much
 * as OVER more slots, and a head often having one split more. */
static int64_t best_splits(int64_t units, int64_t mean, int64_t most, int64_t slots) {
  constexpr int64_t OVER = 128;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t k = 1; k <= most; k++) {
    const int64_t waves = (units * (k + (k >= 8)) + slots - 1) / slots, cost = waves * ((mean + k - 1) / k + OVER);
    if (cost < least) best = k, least = cost;
  }
  return best;
}

template <int KEYS>
static int64_t kept_bytes(kv_kind kind, int64_t D, int64_t dims) {
  if (kind == KV_AS_COMPUTED) return KEYS * D * 2;
  const int64_t bytes = kv_packed_bytes(kind, dims), past = kv_packed_bytes(kind, D) - bytes;
  return KEYS * bytes + 16 + (past + 15) / 16 * 16; /* lanes without numbers read past them */
}

/* The same for every call of these shapes on this GPU. */
template <class E, int D, int ROWS, bool PACKED>
static Plan plan_of(const kv_decode *a, const Parts &x) {
  using R = RingHeads<E, D, ROWS, PACKED>;
  constexpr int64_t MOST_SHARED = 101376, HEADS = (sizeof(typename R::Heads) + 127) / 128 * 128;
  int device = 0, units = 1, bytes = 0; /* of a multiprocessor's shared memory */
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  Plan y = {{R::MOST_WARPS, 2, (int)kept_bytes<R::KEYS>(a->slots.k_kind, D, a->D),
             (int)kept_bytes<R::KEYS>(a->slots.v_kind, D, a->D)},
            0,
            0,
            0,
            false,
            0};
  Ring &ring = y.ring;
  while (!PACKED && ring.stages < 4 && (ring.stages + 1) * ring.stage() * R::MOST_WARPS <= 72 * 1024) ring.stages++;
  while (ring.warps > 1 && HEADS + ring.bytes() > MOST_SHARED) ring.warps--;
  const int64_t parts = R::part_bytes(x.rows, ring.warps, a->D);
  y.out = (int)(HEADS + (parts + 15) / 16 * 16);
  const int64_t out = parts + 16 + (a->D + 2) * 4 * x.rows;
  y.shared = (int)(HEADS + (out > ring.bytes() ? out : ring.bytes()));
  /* Of rows as computed one block of a multiprocessor reads as fast as memory does. */
  const int64_t fit = PACKED ? bytes / (y.shared + 1024) : 1, slots = units * (fit < 1 ? 1 : fit > 3 ? 3 : fit);
  const int64_t heads = a->B * a->Hkv, mean = (a->rows_prefix + a->rows) / heads + 1, least = ring.warps * R::KEYS;
  const int64_t most = (mean + least - 1) / least,
                k = best_splits(heads * x.tiles, mean, most < x.splits ? most : x.splits, slots);
  y.whole = most == 1 && !a->prefix.len;
  y.least = y.whole ? INT32_MAX / 2 / R::KEYS * R::KEYS : (int)(((mean + k - 1) / k + R::KEYS - 1) / R::KEYS * R::KEYS);
  const int64_t blocks = heads * x.tiles * (k + !y.whole);
  y.blocks = (int)(blocks < INT32_MAX ? blocks : INT32_MAX);
  return y;
}

/* f(e, d, rows, packed), constants, for the ring of a group's heads. Packed rows of 96 are tiles of 128. */
template <class F>
static int with_ring(const kv_decode *a, F f) {
  return dispatch(a->dtype, a->D, [&](auto e, auto d) {
    using E = decltype(e);
    constexpr int D = decltype(d)::value;
    if constexpr (sizeof(E) == 2) {
      const auto rows = [&](auto packed, auto width) {
        /* of 256 packed numbers registers hold no more than 8 rows */
        if constexpr (!decltype(packed)::value || decltype(width)::value < 256)
          if (a->H > 8 * a->Hkv) return f(e, width, std::integral_constant<int, 16>{}, packed);
        return f(e, width, std::integral_constant<int, 8>{}, packed);
      };
      return is_packed(*a) ? rows(std::true_type{}, std::integral_constant < int, D == 96 ? 128 : D > {})
                           : rows(std::false_type{}, d);
    }
    return 0;
  });
}

static bool by_lanes(const kv_decode *a) { return a->H <= most_lanes(a->dtype != KV_F32, is_packed(*a)) * a->Hkv; }

static bool by_ring(const kv_decode *a) { return a->dtype != KV_F32 && !by_lanes(a); }

static Outputs outputs_of(const kv_decode *a) {
  return {a->B, a->H, a->Hkv, 1, a->D, a->sinks, a->out, a->lse, by_ring(a) && kv_is_rotated(a->slots.v_kind)};
}

static int run_ring(const kv_decode *a, const Scratch &x, void *stream) {
  return with_ring(a, [&](auto e, auto d, auto rows, auto packed) {
    using E = decltype(e);
    constexpr int D = decltype(d)::value, ROWS = decltype(rows)::value;
    constexpr bool PACKED = decltype(packed)::value;
    const Plan plan = plan_of<E, D, ROWS, PACKED>(a, x.parts);
    const int error =
        launch_early<ring_kernel<E, D, ROWS, PACKED>>(dim3((unsigned)plan.blocks), plan.ring.warps * 32, plan.shared,
                                                      stream, *a, x, plan, logits_of(a->scale, a->softcap));
    return error || plan.whole ? error : combine<E>(x.parts, outputs_of(a), stream);
  });
}

/* f(e, d, x) with the tile x for a group's heads, of fp32. Of 256 dimensions registers hold no more than 16 rows. */
template <class F>
static int with_tile(const kv_decode *a, F f) {
  return dispatch(KV_F32, a->D, [&](auto e, auto d) {
    using E = decltype(e);
    constexpr int D = decltype(d)::value;
    if constexpr (sizeof(E) == 4) {
      if constexpr (D < 256)
        if (a->H / a->Hkv > NarrowTile<E, D>::ROWS) return f(e, d, MediumTile<E, D>{});
      return f(e, d, NarrowTile<E, D>{});
    }
    return 0;
  });
}

static int run_tiles(const kv_decode *a, const Scratch &x, void *stream) {
  return with_tile(a, [&](auto e, auto d, auto tile) {
    using E = decltype(e);
    using X = decltype(tile);
    const dim3 grid((unsigned)(a->B * a->Hkv), (unsigned)x.parts.splits, (unsigned)x.parts.tiles);
    const int error = launch<tiles_kernel<E, decltype(d)::value, X>>(grid, X::THREADS, X::SHARED, stream, *a, x,
                                                                     logits_of(a->scale, a->softcap));
    return error ? error : combine<E>(x.parts, outputs_of(a), stream);
  });
}

static Scratch planned(const kv_decode *a, Cutter &scratch) {
  const auto of_tile = [](auto, auto, auto x) { return decltype(x)::ROWS; };
  const auto of_ring = [](auto, auto, auto rows, auto) { return decltype(rows)::value; };
  return scratch_of(a,
                    by_lanes(a)  ? a->H / a->Hkv
                    : by_ring(a) ? with_ring(a, of_ring)
                                 : with_tile(a, of_tile),
                    scratch);
}

int64_t kv_decode_cuda_scratch(const kv_decode *a) {
  Cutter scratch = {nullptr, 0};
  if (a->B * a->Hkv > 0) planned(a, scratch);
  return scratch.bytes;
}

int kv_decode_cuda(const kv_decode *a, void *memory, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0) return 0;
  Cutter scratch = {memory, 0};
  const Scratch x = planned(a, scratch);
  int error = 0;
  if (is_packed(*a) && !by_ring(a)) error = launch<append_kernel>(dim3((unsigned)heads), 64, 0, stream, *a);
  if (error == 0)
    error = by_lanes(a) ? run_lanes(a, x, stream) : by_ring(a) ? run_ring(a, x, stream) : run_tiles(a, x, stream);
  if (error || !a->probs) return error;
  return launch<probs_kernel>(grid_of((a->C + THREADS - 1) / THREADS, heads), THREADS, 0, stream, *a, x.logit);
}
