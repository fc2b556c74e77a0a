/* Decode of GQA groups with few heads, without tensor cores. L lanes share a row of keys or values, each lane with V
 * vectors of 16 bytes. Such a set of L lanes, called a group of lanes, computes every GROUPS-th slot of a split and
 * has softmax states of its own. The block that finishes last for a kv head merges all splits of that head.
 *
 * Shared memory: 4 * HEADS * (D + 2) bytes for each of 128 / L groups of lanes, and 16 bytes for block_is_last. */
#ifndef KV_LANES_CUH
#define KV_LANES_CUH
#include "decode.cuh"

constexpr int THREADS = 128;

/* Queries, outputs and softmax states of the HEADS query heads of one kv head, in a group of L lanes. Vector v of
 * lane i begins with element (v * L + i) * W of a row. A lane loads AHEAD rows of keys and of values at once,
 * limited by registers: at most 8, so that a multiprocessor has room for several blocks, and half as many if keys,
 * values or both are PACKED. */
template <class E, int L, int V, int HEADS, bool PACKED>
struct HeadRows {
  static constexpr int W = VECTOR<E>, GROUPS = THREADS / L,
                       AHEAD = (HEADS == 1 ? 8 : 16 / HEADS) / V / (PACKED ? 2 : 1);
  float q[HEADS][V][W], o[HEADS][V][W];
  kv_state state[HEADS];
  float more[HEADS]; /* q . centre, which is added to the logits of packed keys */

  KV_DEVICE int group() { return threadIdx.x / L; }
  KV_DEVICE int element(int v) { return (v * L + threadIdx.x % L) * W; }

  /* Loads the queries times `scale`, 0 from element D on, and clears outputs and states. query: the first head's
   * row; stride: elements from head to head. Queries are rotated by the Hadamard matrix if keys are. */
  __device__ __forceinline__ void start(const E *query, int64_t stride, int D, float scale, const Columns &k) {
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      state[g] = {-INFINITY, 0};
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++) {
          q[g][v][i] = element(v) < D ? scale * to_float(query[g * stride + element(v) + i]) : 0;
          o[g][v][i] = 0;
        }
    }
    if constexpr (PACKED) start_packed(D, k);
  }

  __device__ __forceinline__ void start_packed(int D, const Columns &k) {
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      more[g] = 0;
      if (k.kind == KV_AS_COMPUTED) continue;
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++)
          if (k.centre && element(v) < D) more[g] += q[g][v][i] * k.centre[element(v) + i];
      more[g] = lanes_sum<L>(more[g]);
      if (kv_is_rotated(k.kind)) hadamard<W, L, V>(q[g], D);
    }
  }

  /* Calls f(std::true_type{}) if the columns of x are packed, else f(std::false_type{}); in decode either all are
   * packed or none. */
  template <class F>
  KV_DEVICE void each_kind(const Columns &x, F f) {
    if (!PACKED || x.kind == KV_AS_COMPUTED)
      f(std::false_type{});
    else
      f(std::true_type{});
  }

  /* Loads this lane's part of columns c0, c0 + GROUPS, ..; columns from c1 on and elements from D on are 0.
   * Addresses in x of unpacked rows already point to element(0) of this lane. */
  KV_DEVICE void load(const Columns &x, int c0, int c1, int D, uint4 (&part)[AHEAD][V]) {
    each_kind(x, [&](auto packed) {
#pragma unroll
      for (int u = 0; u < AHEAD; u++)
#pragma unroll
        for (int v = 0; v < V; v++) {
          const int c = c0 + u * GROUPS;
          const uint64_t row = kv_segments_at(&x.at, c);
          if constexpr (decltype(packed)::value)
            part[u][v] = packed_part<E>(row, x.kind, element(v), D, c < c1);
          else
            part[u][v] = load_once_16_if(reinterpret_cast<const uint4 *>(row) + v * L, c < c1 && element(v) < D);
        }
    });
  }

  template <bool packed>
  KV_DEVICE void numbers(uint4 part, kv_kind kind, float (&x)[W]) {
    if constexpr (packed)
      packed_numbers<E>(part, kind, x);
    else
      vector_floats<E>(part, x);
  }

  /* s [HEADS] = q.k of one key with each head's query; all lanes of the group of lanes get the sum. */
  template <bool packed>
  __device__ __forceinline__ void dots(const uint4 (&k)[V], kv_kind kind, float (&s)[HEADS]) const {
    float x[V][W];
#pragma unroll
    for (int v = 0; v < V; v++) numbers<packed>(k[v], kind, x[v]);
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      float sum = 0;
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++) sum += q[g][v][i] * x[v][i];
      s[g] = lanes_sum<L>(sum) + (packed ? more[g] : 0);
    }
  }

  /* Replaces logits s by attention weights, and rescales states and outputs to the new maximum. */
  __device__ __forceinline__ void softmax(float (&s)[AHEAD][HEADS]) {
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      kv_state &x = state[g];
      const float before = x.m;
#pragma unroll
      for (int u = 0; u < AHEAD; u++) x.m = fmaxf(x.m, s[u][g]);
      const float alpha = x.weight(before);
      x.d *= alpha;
#pragma unroll
      for (int u = 0; u < AHEAD; u++) x.d += s[u][g] = x.weight(s[u][g]);
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++) o[g][v][i] *= alpha;
    }
  }

  template <bool packed>
  __device__ __forceinline__ void add(const float (&p)[HEADS], const uint4 (&value)[V], kv_kind kind) {
#pragma unroll
    for (int v = 0; v < V; v++) {
      float x[W];
      numbers<packed>(value[v], kind, x);
#pragma unroll
      for (int g = 0; g < HEADS; g++)
#pragma unroll
        for (int i = 0; i < W; i++) o[g][v][i] += p[g] * x[i];
    }
  }

  /* Adds slots c0 .. c1 - 1 to states and outputs. logit [HEADS, C] gets the logits, or is NULL. Every group of
   * lanes runs the loop equally often, since lanes_sum needs all lanes of a warp. */
  __device__ __forceinline__ void attend(const Columns &k, const Columns &v, int c0, int c1, int D,
                                         const Logits &logits, float *logit, int64_t C) {
    constexpr int STEP = AHEAD * GROUPS;
    uint4 keys[AHEAD][V], values[AHEAD][V];
    load(k, c0 + group(), c1, D, keys);
    for (int base = c0; base < c1; base += STEP) {
      const int c = base + group();
      float s[AHEAD][HEADS];
      load(v, c, c1, D, values);
      each_kind(k, [&](auto packed) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) dots<decltype(packed)::value>(keys[u], k.kind, s[u]);
      });
      load(k, c + STEP, c1, D, keys); /* the next keys load during the rest of the loop's body */
      if (logits.cap > 0) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
#pragma unroll
          for (int g = 0; g < HEADS; g++) s[u][g] = logits.capped(s[u][g]);
      }
      if (base + STEP > c1) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
#pragma unroll
          for (int g = 0; g < HEADS; g++)
            if (c + u * GROUPS >= c1) s[u][g] = -INFINITY;
      }
      if (logit && threadIdx.x % L == 0) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
#pragma unroll
          for (int g = 0; g < HEADS; g++)
            if (c + u * GROUPS < c1) logit[g * C + c + u * GROUPS] = s[u][g];
      }
      softmax(s);
      each_kind(v, [&](auto packed) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) add<decltype(packed)::value>(s[u], values[u], v.kind);
      });
    }
    if constexpr (PACKED)
      if (kv_is_rotated(v.kind))
#pragma unroll
        for (int g = 0; g < HEADS; g++) hadamard<W, L, V>(o[g], D);
  }

  static int64_t shared_bytes(int64_t D) { return HEADS * GROUPS * (D + 2) * 4 + 16; }

  /* Merges the results of the block's groups of lanes into o_out [HEADS, D] and states_out [HEADS]. shared: shared
   * memory of shared_bytes(D) - 16 bytes. */
  __device__ __forceinline__ void merge(float *shared, int D, float *o_out, kv_state *states_out) const {
    kv_state *states = reinterpret_cast<kv_state *>(shared);
    float *part = shared + 2 * HEADS * GROUPS;
    __syncthreads();
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      const int at = g * GROUPS + group();
      if (threadIdx.x % L == 0) states[at] = state[g];
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++)
          if (element(v) < D) part[at * D + element(v) + i] = o[g][v][i];
    }
    merge_groups(GROUPS, states, part, HEADS, D, o_out, states_out);
  }
};

/* Block (kv head, i) computes split i of the head and every gridDim.y-th split after it. HEADS: query heads of a GQA
 * group; PACKED: keys, values or both are packed. The launch bounds ask ptxas for two blocks a multiprocessor: to
 * make room for four it would spill registers. */
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

template <class E, int L, int V, int HEADS>
static int run(const kv_decode *a, const Scratch &x, void *stream) {
  /* A head gets four blocks for each split that a head of mean length has. A head with more splits than blocks has
   * blocks that compute several. */
  const int64_t heads = a->B * a->Hkv, mean = (a->rows_prefix + a->rows) / (heads * 2 * STEP) + 1;
  const int64_t blocks = 4 * mean < x.parts.splits ? 4 * mean : x.parts.splits;
  const dim3 grid((unsigned)heads, (unsigned)blocks);
  const auto shared = (size_t)HeadRows<E, L, V, HEADS, false>::shared_bytes(a->D);
  const Logits logits = logits_of(a->scale, a->softcap);
  if constexpr (HEADS <= most_lanes(sizeof(E) == 2, false))
    if (!is_packed(*a))
      return launch<lanes_kernel<E, L, V, HEADS, false>>(grid, THREADS, shared, stream, *a, x, logits);
  if constexpr (HEADS <= most_lanes(sizeof(E) == 2, true))
    return launch<lanes_kernel<E, L, V, HEADS, true>>(grid, THREADS, shared, stream, *a, x, logits);
  return 0; /* not reached: run_ring takes packed rows in 16 bits */
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
#endif
