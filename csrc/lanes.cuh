/* A decoded token of few heads a group, without tensor cores: L lanes share a row of keys or values, each with V
 * vectors of 16 bytes; such a group of lanes takes every GROUPS-th row, with a state of its own.
 *
 * Shared memory: 4 * HEADS * (D + 2) bytes for each of 128 / L groups, and 16. */
#ifndef KV_LANES_CUH
#define KV_LANES_CUH
#include "stream.cuh"

constexpr int THREADS = 128;

/* A group of lanes' share of HEADS heads, those of one kv head: lane i has elements (v * L + i) * W .. of vector v. It
 * loads AHEAD rows of keys and of values at once: as many as registers hold, at most 8 so that an SM has room for
 * several blocks, and half as many where keys, values or both are PACKED. */
template <class E, int L, int V, int HEADS, bool PACKED>
struct HeadRows {
  static constexpr int W = VECTOR<E>, GROUPS = THREADS / L,
                       AHEAD = (HEADS == 1 ? 8 : 16 / HEADS) / V / (PACKED ? 2 : 1);
  float q[HEADS][V][W], o[HEADS][V][W];
  kv_state state[HEADS];
  float more[HEADS]; /* the centre of packed keys adds it to every logit */

  static __device__ __forceinline__ int group() { return threadIdx.x / L; }
  static __device__ __forceinline__ int element(int v) { return (v * L + threadIdx.x % L) * W; }

  /* query: the first head's row. Elements from D on are zeros. Rotated keys meet rotated queries. */
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

  /* f(packed), a constant: columns are all packed or none. */
  template <class F>
  static __device__ __forceinline__ void each_kind(const Columns &x, F f) {
    if (!PACKED || x.kind == KV_AS_COMPUTED)
      f(std::false_type{});
    else
      f(std::true_type{});
  }

  /* Columns c, c + GROUPS, ..; zeros for those from c1 on and elements from D on. Addresses as computed begin with
   * element(0). */
  static __device__ __forceinline__ void load(const Columns &x, int c0, int c1, int D, uint4 (&part)[AHEAD][V]) {
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
  static __device__ __forceinline__ void numbers(uint4 part, kv_kind kind, float (&x)[W]) {
    if constexpr (packed)
      packed_numbers<E>(part, kind, x);
    else
      vector_floats<E>(part, x);
  }

  /* s = q.k of the heads, equal in all lanes of the group */
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

  /* Rows of logits s become their weights; the state and o follow the maximum. */
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

  /* Slots c0 .. c1 - 1; logit: of the first head, heads C apart, or NULL. Every group of lanes runs the loop equally
   * often. */
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
      load(k, c + STEP, c1, D, keys); /* in flight during the rest */
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

  /* Merges the block's groups of lanes: o [HEADS, D], states [HEADS]. shared: shared_bytes(D) less 16. */
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
#endif
