/* One decode step on a GPU. Limited by memory bandwidth, so a block reads each row once for all heads of its group. The
 * slots of a head are cut into splits that depend only on the number of slots and heads; whichever block finishes a
 * head's last split combines all of them in order: the same bits every time.
 *
 * L lanes share a row, each with V vectors of 16 bytes; such a group of lanes takes every GROUPS-th row and has a
 * softmax (m, l) and an output o of its own. Arithmetic is fp32, logits are in log2 units.
 *
 * Shared memory: 4 * HEADS * (D + 2) bytes for each of 128 / L groups. budget: regs 255, smem 34000 */
#include "grid.cuh"
#include "vector.cuh"
#include "warp.cuh"

constexpr int THREADS = 128;
constexpr int SPLIT = 128;   /* slots of a split, at least */
constexpr int MOST = 64;     /* splits of a head, at most: a warp combines as many in two steps */
constexpr int BLOCKS = 4096; /* splits of all heads, about at most: more would not keep a GPU busier */
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

struct Scratch {
  int splits;        /* most splits of a head */
  uint32_t *counter; /* [B, Hkv] 0 */
  float *o;          /* [B, Hkv, splits, G, D] */
  float2 *ml;        /* [B, Hkv, splits, G] */
  float *logit;      /* [B, Hkv, G, C], or NULL */
  int64_t bytes;
};

static Scratch scratch_of(const kv_decode *a, void *memory) {
  const int64_t heads = a->B * a->Hkv, whole = round_up(a->rows_prefix + a->rows, SPLIT) / SPLIT;
  int64_t splits = heads > BLOCKS / MOST ? BLOCKS / heads : MOST;
  if (splits > whole) splits = whole;
  const int64_t least = a->prefix.len ? 2 : 1;
  if (splits < least) splits = least;
  uintptr_t at = reinterpret_cast<uintptr_t>(memory);
  const auto take = [&](int64_t bytes) {
    const uintptr_t mine = at;
    at += (uintptr_t)round_up(bytes, 256);
    return mine;
  };
  Scratch x;
  x.splits = (int)splits;
  x.counter = (uint32_t *)take(heads * 4);
  x.o = (float *)take(a->B * a->H * splits * a->D * 4);
  x.ml = (float2 *)take(a->B * a->H * splits * 8);
  x.logit = a->probs ? (float *)take(a->B * a->H * a->C * 4) : nullptr;
  x.bytes = (int64_t)(at - reinterpret_cast<uintptr_t>(memory));
  return x;
}

/* Slots of a split, given how many slots and at most how many splits a head has. */
static __device__ int split_size(int n, int splits) {
  const int fair = (n + splits - 1) / splits;
  return max(SPLIT, (fair + 63) / 64 * 64);
}

/* A group of lanes' share of HEADS heads: lane i has elements (v * L + i) * W .. of vector v. It loads AHEAD rows of
 * keys and of values at once: as many as registers hold, at most 8 so that an SM has room for several blocks. */
template <class E, int L, int V, int HEADS>
struct Rows {
  static constexpr int W = VECTOR<E>, GROUPS = THREADS / L, AHEAD = (HEADS == 1 ? 8 : 16 / HEADS) / V;
  float q[HEADS][V][W], o[HEADS][V][W], m[HEADS], l[HEADS];

  static __device__ __forceinline__ int group() { return threadIdx.x / L; }
  static __device__ __forceinline__ int element(int v) { return (v * L + threadIdx.x % L) * W; }

  /* query: the first head's row. Heads from `heads` on and elements from D on are zeros. */
  __device__ __forceinline__ void start(const E *query, int64_t stride, int heads, int D, float scale) {
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      m[g] = -INFINITY, l[g] = 0;
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++) {
          const bool inside = g < heads && element(v) < D;
          q[g][v][i] = inside ? scale * to_float(query[g * stride + element(v) + i]) : 0;
          o[g][v][i] = 0;
        }
    }
  }

  /* The lane's part of n - 1 stored rows and of the new row, addressed as slot n - 1 with the stored rows' stride. */
  static __device__ __forceinline__ kv_segments slots_of(const E *stored, const E *chunk, int n, int D) {
    const int stride = D * (int)sizeof(E);
    const uint64_t slot0 = (uint64_t)(chunk + element(0)) - (uint64_t)(n - 1) * stride;
    return {(uint64_t)(stored + element(0)), slot0, stride, stride, n - 1, n};
  }

  /* Rows c, c + GROUPS, ..; zeros for rows from c1 on and elements from D on. */
  static __device__ __forceinline__ void load(const kv_segments &x, int c, int c1, int D, uint4 (&part)[AHEAD][V]) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++, c += GROUPS)
#pragma unroll
      for (int v = 0; v < V; v++)
        part[u][v] =
            load_once_16_if(reinterpret_cast<const uint4 *>(kv_segments_at(&x, c)) + v * L, c < c1 && element(v) < D);
  }

  /* s = q.k of the heads, equal in all lanes of the group */
  __device__ __forceinline__ void dots(const uint4 (&k)[V], float (&s)[HEADS]) const {
    float x[V][W];
#pragma unroll
    for (int v = 0; v < V; v++) vector_floats<E>(k[v], x[v]);
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      float sum = 0;
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++) sum += q[g][v][i] * x[v][i];
      s[g] = lanes_sum<L>(sum);
    }
  }

  /* Rows of logits s become p = 2^(s - m); l and o follow m. While nothing was seen m is -inf; 0 stands in for it. */
  __device__ __forceinline__ void softmax(float (&s)[AHEAD][HEADS]) {
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      float top = m[g];
#pragma unroll
      for (int u = 0; u < AHEAD; u++) top = fmaxf(top, s[u][g]);
      const float from = top == -INFINITY ? 0 : top, alpha = exp2_approx(m[g] - from);
      m[g] = top;
      l[g] *= alpha;
#pragma unroll
      for (int u = 0; u < AHEAD; u++) l[g] += s[u][g] = exp2_approx(s[u][g] - from);
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++) o[g][v][i] *= alpha;
    }
  }

  __device__ __forceinline__ void add(const float (&p)[HEADS], const uint4 (&value)[V]) {
#pragma unroll
    for (int v = 0; v < V; v++) {
      float x[W];
      vector_floats<E>(value[v], x);
#pragma unroll
      for (int g = 0; g < HEADS; g++)
#pragma unroll
        for (int i = 0; i < W; i++) o[g][v][i] += p[g] * x[i];
    }
  }

  /* Slots c0 .. c1 - 1; logit: of the first head, heads C apart, or NULL. Every group of lanes runs the loop equally
   * often. */
  __device__ __forceinline__ void attend(const kv_segments &k, const kv_segments &v, int c0, int c1, int D, float cap,
                                         float *logit, int64_t C, int heads) {
    constexpr int STEP = AHEAD * GROUPS;
    uint4 keys[AHEAD][V], values[AHEAD][V];
    load(k, c0 + group(), c1, D, keys);
    for (int base = c0; base < c1; base += STEP) {
      const int c = base + group();
      float s[AHEAD][HEADS];
      load(v, c, c1, D, values);
#pragma unroll
      for (int u = 0; u < AHEAD; u++) dots(keys[u], s[u]);
      load(k, c + STEP, c1, D, keys); /* in flight during the rest */
      if (cap > 0) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
#pragma unroll
          for (int g = 0; g < HEADS; g++) s[u][g] = cap * tanhf(s[u][g]);
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
            if (c + u * GROUPS < c1 && g < heads) logit[g * C + c + u * GROUPS] = s[u][g];
      }
      softmax(s);
#pragma unroll
      for (int u = 0; u < AHEAD; u++) add(s[u], values[u]);
    }
  }

  static int64_t shared_bytes(int64_t D) { return HEADS * GROUPS * (D + 2) * 4 + 16; }

  /* Merges the block's groups of lanes: o [heads, D], ml [heads]. shared: shared_bytes(D) less 16. */
  __device__ __forceinline__ void merge(float *shared, int heads, int D, float *o_out, float2 *ml_out) const {
    float2 *ml = reinterpret_cast<float2 *>(shared);
    float *part = shared + 2 * HEADS * GROUPS;
    __syncthreads();
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
      const int at = g * GROUPS + group();
      if (threadIdx.x % L == 0) ml[at] = make_float2(m[g], l[g]);
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < W; i++)
          if (element(v) < D) part[at * D + element(v) + i] = o[g][v][i];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < heads * D; at += THREADS) {
      const int g = at / D, d = at % D;
      float top = -INFINITY, sum = 0, length = 0;
      for (int j = 0; j < GROUPS; j++) top = fmaxf(top, ml[g * GROUPS + j].x);
      for (int j = 0; j < GROUPS; j++) {
        const float weight = exp2_approx(ml[g * GROUPS + j].x - (top == -INFINITY ? 0 : top));
        sum += weight * part[(g * GROUPS + j) * D + d];
        length += weight * ml[g * GROUPS + j].y;
      }
      o_out[at] = sum;
      if (d == 0) ml_out[g] = make_float2(top, length);
    }
  }
};

/* Writes one head's new row after its slots. */
template <class E>
static __device__ void append(const kv_decode &a, int64_t b, const E *k, const E *v, int64_t row) {
  const int d = threadIdx.x * VECTOR<E>;
  if (d < a.D) {
    *reinterpret_cast<uint4 *>(static_cast<E *>(a.slots.k) + row * a.D + d) = *reinterpret_cast<const uint4 *>(k + d);
    *reinterpret_cast<uint4 *>(static_cast<E *>(a.slots.v) + row * a.D + d) = *reinterpret_cast<const uint4 *>(v + d);
  }
  if (threadIdx.x == 0) a.slots.pos[row] = a.chunk.pos[b];
}

/* out and lse of one query head from its splits, by one warp. part: the first split's o; splits are `step` floats
 * apart. */
template <class E>
static __device__ void finish(const float *part, int step, const float2 *ml, int ml_step, int splits, int D, float sink,
                              E *out, float *lse) {
  constexpr int AHEAD = 16; /* splits that are loaded at once; those past the last have weight 0 */
  const int lane = lane_id();
  float2 mine[2];
  float weight[2], top = sink, sum = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    mine[i] = lane + 32 * i < splits ? ml[(lane + 32 * i) * ml_step] : make_float2(-INFINITY, 0);
    top = fmaxf(top, mine[i].x);
  }
  top = lanes_max(top);
  const float from = top == -INFINITY ? 0 : top;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    weight[i] = exp2_approx(mine[i].x - from);
    sum += weight[i] * mine[i].y;
  }
  const float l = exp2_approx(sink - from) + lanes_sum(sum);
  if (lane == 0) *lse = LN2 * (top + log2f(l));
  for (int d0 = 0; d0 < D; d0 += 32 * 4) {
    const int d = d0 + 4 * lane;
    float4 o = make_float4(0, 0, 0, 0);
    for (int i0 = 0; i0 < splits; i0 += AHEAD) {
      float4 x[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        x[i] = i0 + i < splits && d < D ? *reinterpret_cast<const float4 *>(part + (i0 + i) * step + d)
                                        : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const float w = __shfl_sync(ALL_LANES, i0 < 32 ? weight[0] : weight[1], i0 % 32 + i);
        o.x += w * x[i].x, o.y += w * x[i].y, o.z += w * x[i].z, o.w += w * x[i].w;
      }
    }
    if (d >= D) continue;
    const float over = l == 0 ? 0 : 1 / l;
    out[d] = from_float<E>(o.x * over), out[d + 1] = from_float<E>(o.y * over);
    out[d + 2] = from_float<E>(o.z * over), out[d + 3] = from_float<E>(o.w * over);
  }
}

/* Slots of a head in the prefix. */
static __device__ __forceinline__ int prefix_len(const kv_decode &a, int64_t head) {
  return a.prefix.len ? a.prefix.len[head] : 0;
}

/* Asked for two blocks an SM, ptxas does not spill registers to make room for four. */
template <class E, int L, int V, int HEADS>
static __global__ void __launch_bounds__(THREADS, 2) decode_kernel(const kv_decode a, const Scratch x) {
  using R = Rows<E, L, V, HEADS>;
  const int64_t head = blockIdx.x, b = head / a.Hkv, h = head % a.Hkv, step = x.splits;
  const int G = (int)(a.H / a.Hkv), D = (int)a.D;
  const int64_t *ks = a.chunk.k_stride, *vs = a.chunk.v_stride;
  const int shared_len = prefix_len(a, head), len = a.slots.len[head];
  /* No split has slots of the prefix and of the head's own: there may be one more. */
  const int size = split_size(shared_len + len + 1, x.splits - (a.prefix.len ? 1 : 0));
  const int before = (shared_len + size - 1) / size;
  const int splits = before + (len + size) / size;
  float *shared = shared_memory<float>() + 4;
  for (int split = blockIdx.y; split < splits; split += gridDim.y) {
    /* Read anew for every split: registers are scarce. */
    const bool own = split >= before;
    const int c0 = (own ? split - before : split) * size, end = own ? len + 1 : prefix_len(a, head);
    const int c1 = min(end, c0 + size), most = own ? len + 1 : INT32_MAX; /* the new row is the last of its own */
    const int64_t offset = (own ? a.slots.offset : a.prefix.offset)[head];
    const E *new_k = static_cast<const E *>(a.chunk.k) + b * ks[0] + h * ks[1];
    const E *new_v = static_cast<const E *>(a.chunk.v) + b * vs[0] + h * vs[1];
    const kv_segments k =
        R::slots_of(static_cast<const E *>(own ? a.slots.k : a.prefix.k) + offset * D, new_k, most, D);
    const kv_segments v =
        R::slots_of(static_cast<const E *>(own ? a.slots.v : a.prefix.v) + offset * D, new_v, most, D);
    if (own && c1 == end) append(a, b, new_k, new_v, offset + len);
    for (int g = 0; g < G; g += HEADS) {
      const int64_t at = (head * step + split) * G + g;
      float *logit = x.logit ? x.logit + (head * G + g) * a.C + (own ? prefix_len(a, head) : 0) : nullptr;
      const E *query = static_cast<const E *>(a.q) + b * a.q_stride[0] + (h * G + g) * a.q_stride[1];
      R rows;
      rows.start(query, a.q_stride[1], G - g, D, a.softcap > 0 ? a.scale / a.softcap : a.scale * LOG2E);
      rows.attend(k, v, c0, c1, D, a.softcap * LOG2E, logit, a.C, G - g);
      rows.merge(shared, min(G - g, HEADS), D, x.o + at * D, x.ml + at);
    }
    if (!block_is_last(x.counter + head, splits, shared_memory<uint32_t>())) continue;
    for (int g = warp_id(); g < G; g += THREADS / 32) {
      const int64_t at = head * step * G + g, to = b * a.H + h * G + g;
      const float sink = a.sinks ? a.sinks[h * G + g] * LOG2E : -INFINITY;
      finish<E>(x.o + at * D, G * D, x.ml + at, G, splits, D, sink, static_cast<E *>(a.out) + to * D, a.lse + to);
    }
  }
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
  const int64_t heads = a->B * a->Hkv, rows = a->rows_prefix + a->rows;
  const int64_t mean = rows / (heads * SPLIT) + 1;                  /* splits of a head */
  const int64_t blocks = 4 * mean < x.splits ? 4 * mean : x.splits; /* a longer head's take several */
  const auto shared = (size_t)Rows<E, L, V, HEADS>::shared_bytes(a->D);
  return launch<decode_kernel<E, L, V, HEADS>>(dim3((unsigned)heads, (unsigned)blocks), THREADS, shared, stream, *a, x);
}

template <class E, int HEADS>
static int run_width(const kv_decode *a, const Scratch &x, void *stream) {
  constexpr int W = VECTOR<E>;
  if (a->D <= 64) return run<E, 64 / W, 1, HEADS>(a, x, stream);
  if (a->D <= 128) return run<E, 128 / W, 1, HEADS>(a, x, stream);
  return run<E, 32, 8 / W, HEADS>(a, x, stream);
}

template <class E>
static int run_heads(const kv_decode *a, const Scratch &x, void *stream) {
  const int64_t G = a->H / a->Hkv;
  if (G == 1) return run_width<E, 1>(a, x, stream);
  if (G == 2) return run_width<E, 2>(a, x, stream);
  return G <= 4 ? run_width<E, 4>(a, x, stream) : run_width<E, 8>(a, x, stream);
}

int64_t kv_decode_cuda_scratch(const kv_decode *a) { return scratch_of(a, nullptr).bytes; }

int kv_decode_cuda(const kv_decode *a, void *scratch, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0) return 0;
  const Scratch x = scratch_of(a, scratch);
  int error = (int)cudaMemsetAsync(x.counter, 0, heads * sizeof *x.counter, (cudaStream_t)stream);
  if (error == 0) error = dispatch(a->dtype, [&](auto e) { return run_heads<decltype(e)>(a, x, stream); });
  if (error || !a->probs) return error;
  return launch<probs_kernel>(grid_of((a->C + THREADS - 1) / THREADS, heads), THREADS, 0, stream, *a, x.logit);
}
