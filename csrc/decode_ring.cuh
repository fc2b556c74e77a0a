/* Decode in 16 bits on tensor cores: the kernel around ring.cuh, and the plan that cuts its work into splits and
 * blocks. */
#ifndef KV_DECODE_RING_CUH
#define KV_DECODE_RING_CUH
#include "decode.cuh"
#include "ring.cuh"

/* How a launch cuts the heads' slots into splits, and what a block has in shared memory. */
struct Plan {
  Ring ring;
  int least, blocks, shared; /* least: minimum slots of a split; blocks: of the grid; shared: bytes of shared memory */
  int together;              /* the most batch rows whose query heads are one tile */
  /* Whether every head has one split, since slots are few. A block then merges its results at byte `out` of shared
   * memory and writes the call's out and lse itself. */
  bool whole;
  int out;
};

/* Split number `split` of kv head `head`; past the last split, `head` is the number of heads. */
struct Place {
  int head, split;
};

/* Returns split n of the splits of all heads, counted from 0 in the order of heads. All lanes of the warp must call
 * it together. */
template <int KEYS>
KV_DEVICE Place place_of(const kv_decode &a, const Parts &x, int least, int n) {
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

/* Finds the batch rows whose heads number h have the same slots in the prefix as batch row b's, and the same splits of
 * them. Each `most` of them, in order, are one tile. Writes the rows of b's tile to `batch` if b is the first of them,
 * and returns their number; else returns 0. All lanes of the warp must call it together. */
template <int KEYS>
KV_DEVICE int sharing(const kv_decode &a, const Parts &x, int least, int b, int h, int size, int most, int *batch) {
  const auto alike = [&](int other) {
    const int64_t one = (int64_t)b * a.Hkv + h, head = (int64_t)other * a.Hkv + h;
    return other < a.B && a.prefix.offset[head] == a.prefix.offset[one] && a.prefix.len[head] == a.prefix.len[one] &&
           cut_of<KEYS>(a, x, head, least).size == size;
  };
  int before = 0, found = 0;
  for (int first = 0; first < a.B && found < most; first += 32) {
    const uint32_t its = __ballot_sync(ALL_LANES, alike(first + lane_id()));
    const uint32_t earlier = first + 32 <= b ? ~0u : first <= b ? (1u << (b - first)) - 1 : 0;
    before += __popc(its & earlier);
    const int place = found + __popc(its & ~earlier & ((1u << lane_id()) - 1)); /* of this lane's row in the tile */
    if (its & ~earlier & (1u << lane_id()) && place < most) batch[place] = first + lane_id();
    found += __popc(its & ~earlier);
  }
  __syncwarp(); /* all lanes have written `batch` */
  return before % most ? 0 : min(found, most);
}

/* A unit of work is one split of a head for one tile of its query heads. Block i computes unit i and, if there are
 * more units than blocks, every gridDim.x-th unit after it. A split of a prefix that several batch rows share is read
 * once for a tile of them: every number is computed as for a row alone. */
template <class E, int D, int ROWS, bool PACKED>
static __global__ void __launch_bounds__(RingHeads<E, D, ROWS, PACKED>::MOST_WARPS * 32, PACKED &&ROWS == 16 ? 2 : 3)
    ring_kernel(const kv_decode a, const Scratch x, const Plan plan, const Logits logits) {
  using R = RingHeads<E, D, ROWS, PACKED>;
  const int heads = (int)(a.B * a.Hkv), G = (int)a.H / (int)a.Hkv, tiles = x.parts.tiles;
  R::heads()->clear();
  await_kernels_before();
  start_next_kernel();
  for (int unit = blockIdx.x;; unit += gridDim.x) {
    const Place place = place_of<R::KEYS>(a, x.parts, plan.least, unit / tiles);
    if (place.head == heads) return;
    __syncthreads(); /* all warps are done with the previous unit's shared memory */
    const int head = place.head, split = place.split, tile = unit % tiles, g = tile * ROWS;
    const int b = head / (int)a.Hkv, h = head % (int)a.Hkv, rows = min(G - g, ROWS);
    const Cut cut = cut_of<R::KEYS>(a, x.parts, head, plan.least);
    const Split<E> s = split_of<E>(a, cut, head, split, 0);
    if (!plan.whole && split == 0 && threadIdx.x == 0) x.parts.count[head * tiles + tile] = cut.splits;
    int *const batch = R::heads()->batch[warp_id()];
    int queries = rows;
    if (plan.together > 1 && !s.own) {
      queries = G * sharing<R::KEYS>(a, x.parts, plan.least, b, h, cut.size, plan.together, batch);
      if (queries == 0) continue; /* computed with an earlier batch row */
    }
    const auto row = [&](int r) { return r < G ? b : batch[r / G]; }; /* the batch row of query r */
    const auto pack = [&] {
      for (int i = warp_id(); i < 2; i += blockDim.x / 32) append_packed<E>(a, head, s.new_row, i == 0);
    };
    const int first = s.own ? prefix_len(a, head) : 0; /* column of the first slot */
    const auto keep = [&](const auto &p, int c) {
      if (!x.logit) return;
      R::each([&](int n, int i) {
        const int column = c + R::key(n, i % 2), r = R::head(i / 2);
        if (column < s.c1 && r < queries)
          x.logit[(((int64_t)row(r) * a.Hkv + h) * G + g + r % G) * a.C + first + column] = p[n][i];
      });
    };
    const auto query = [&](int r) {
      return static_cast<const E *>(a.q) + row(r) * a.q_stride[0] + (h * G + g + r % G) * a.q_stride[1];
    };
    R done;
    done.attend(plan.ring, query, queries, s.k, s.v, s.c0, s.c1, s.c1 - s.last, (int)a.D, logits, pack, keep);
    if (s.last && g == 0) append(a, head, s);
    if (!plan.whole) {
      const auto place = [&](int r) {
        const int64_t of_head = row(r) * (int)a.Hkv + h;
        return ((of_head * tiles + tile) * x.parts.splits + split) * x.parts.rows + r % G;
      };
      done.merge(queries, (int)a.D, x.parts.o, x.parts.states, place);
      continue;
    }
    float *const o = shared_memory<float>() + plan.out / 4;
    kv_state *const states = reinterpret_cast<kv_state *>(o + rows * a.D);
    done.merge(rows, (int)a.D, o, states, [](int r) { return r; });
    __syncthreads(); /* the rows are there: merge has written o and states */
    for (int r = warp_id(); r < rows; r += blockDim.x / 32) {
      const int query_head = h * G + g + r, to = b * (int)a.H + query_head;
      finish<E>(o + r * a.D, 0, states + r, 0, 1, (int)a.D, a.sinks ? a.sinks[query_head] * LOG2E : -INFINITY,
                static_cast<E *>(a.out) + (int64_t)to * a.D, a.lse + to, a.slots.v_kind == KV_INT4);
    }
  }
}

/* Returns the number of splits, 1 .. most, of a head of mean length (`mean` slots) for which a GPU with room for
 * `slots` blocks at once finishes first. units: tiles of query heads, of all heads. A split costs as much as OVER
 * more slots. A head that is to have 8 or more splits often gets one more than that. */
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
  return KEYS * bytes + 16 + (past + 15) / 16 * 16; /* lanes past a row's last number read past the last row */
}

/* Plans a launch. The plan depends only on the shapes and the GPU, so results have the same bits every time. */
template <class E, int D, int ROWS, bool PACKED>
static Plan plan_of(const kv_decode *a, const Parts &x) {
  using R = RingHeads<E, D, ROWS, PACKED>;
  constexpr int64_t MOST_SHARED = 101376, HEADS = (sizeof(typename R::Heads) + 127) / 128 * 128;
  int device = 0, units = 1, bytes = 0; /* units: multiprocessors; bytes: shared memory of each */
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  Plan y = {};
  Ring &ring = y.ring = {R::MOST_WARPS, 2, (int)kept_bytes<R::KEYS>(a->slots.k_kind, D, a->D),
                         (int)kept_bytes<R::KEYS>(a->slots.v_kind, D, a->D)};
  while (!PACKED && ring.stages < 4 && (ring.stages + 1) * ring.stage() * R::MOST_WARPS <= 72 * 1024) ring.stages++;
  while (ring.warps > 1 && HEADS + ring.bytes() > MOST_SHARED) ring.warps--;
  y.together = a->prefix.len && x.tiles == 1 ? ROWS / x.rows : 1;
  const int64_t parts = R::part_bytes(y.together * x.rows, ring.warps, a->D);
  y.out = (int)(HEADS + (parts + 15) / 16 * 16);
  const int64_t out = parts + 16 + (a->D + 2) * 4 * x.rows;
  y.shared = (int)(HEADS + (out > ring.bytes() ? out : ring.bytes()));
  /* Unpacked rows are read as fast as memory gives them by one block a multiprocessor. */
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

/* Calls f(e, d, rows, packed), whose arguments carry ring_kernel's template arguments: element type, padded head
 * dimension, query heads of a tile, and whether slots are packed. Packed rows of 96 numbers use tiles of 128. */
template <class F>
static int with_ring(const kv_decode *a, F f) {
  return dispatch(a->dtype, a->D, [&](auto e, auto d) {
    using E = decltype(e);
    constexpr int D = decltype(d)::value;
    if constexpr (sizeof(E) == 2) {
      const auto rows = [&](auto packed, auto width) {
        /* for packed rows of 256 numbers, registers hold no more than 8 query heads */
        if constexpr (!decltype(packed)::value || decltype(width)::value < 256)
          if (a->H > 8 * a->Hkv) return f(e, width, std::integral_constant<int, 16>{}, packed);
        return f(e, width, std::integral_constant<int, 8>{}, packed);
      };
      using PackedD = std::integral_constant<int, (D == 96 ? 128 : D)>;
      return is_packed(*a) ? rows(std::true_type{}, PackedD{}) : rows(std::false_type{}, d);
    }
    return 0;
  });
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
#endif
