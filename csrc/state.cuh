/* Softmax states. The state of a row over some of its slots is (o, m, d): m is the largest logit in log2 units, d
 * the sum of the weights 2^(logit - m), o the sum of weights times values. kv_state holds m and d, and o lies beside
 * it. States of a row over different slots can be merged. Each group of threads and each split of a head's slots has
 * a state of each row; they are merged in a fixed order, so results have the same bits every time. */
#ifndef KV_STATE_CUH
#define KV_STATE_CUH
#include "attention.cuh"

constexpr int MOST_SPLITS = 64; /* largest number of splits of a tile of rows: one warp merges them, two a lane */

struct alignas(8) kv_state {
  float m, d; /* m: largest logit in log2 units, -inf if no slot was seen; d: sum of the weights */

  /* Returns 2^(logit - m), for a logit of at most m: its weight, or the factor of a state whose largest logit it is. */
  __device__ __forceinline__ float weight(float logit) const { return exp2_approx(logit - (m == -INFINITY ? 0 : m)); }

  /* Adds the state `part`, whose m is at most this one's, to this state, and part_o, one number of the part's o, to
   * the same number of this state's o. */
  __device__ __forceinline__ void merge(kv_state part, float part_o, float &o) {
    const float factor = weight(part.m);
    o += factor * part_o;
    d += factor * part.d;
  }

  /* Returns the factor that turns o into the weighted mean of the values, 0 if no slot was seen. factor: included in
   * the result, for an o that was not yet multiplied by it. */
  __device__ __forceinline__ float normalize(float factor = 1) const { return d == 0 ? 0 : factor / d; }
  __device__ __forceinline__ float lse() const { return LN2 * (m + log2f(d)); }
};

/* Cuts scratch memory into arrays. If memory is NULL, it only counts the bytes. */
struct Cutter {
  void *memory;
  int64_t bytes;

  template <class T>
  T *take(int64_t n) {
    T *const mine = reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(memory) + (uintptr_t)bytes);
    bytes += (n * (int64_t)sizeof(T) + 255) / 256 * 256;
    return mine;
  }
};

/* States that all splits leave in scratch. The G * T query rows of a kv head, in time-major order, are `tiles` tiles
 * of `rows` rows; heads = B * Hkv. */
struct Parts {
  int splits, tiles, rows; /* splits: largest number in any tile */
  uint32_t *count;         /* [heads, tiles] number of splits of each tile */
  kv_state *states;        /* [heads, tiles, splits, rows] m and d of each row */
  float *o;                /* [heads, tiles, splits, rows, D] o of each row */
};

/* Takes the arrays of Parts from scratch. heads: B * Hkv; all: rows of a kv head; rows: rows of a tile. */
static inline Parts parts_of(Cutter &scratch, int64_t heads, int64_t all, int64_t rows, int64_t splits, int64_t D) {
  Parts x = {(int)splits, (int)((all + rows - 1) / rows), (int)(all < rows ? all : rows), nullptr, nullptr, nullptr};
  const int64_t tiles = heads * x.tiles, parts = tiles * splits * x.rows;
  x.count = scratch.take<uint32_t>(tiles);
  x.o = scratch.take<float>(parts * D);
  x.states = scratch.take<kv_state>(parts);
  return x;
}

/* Merges the states that `groups` groups of threads have of each row: states [rows, groups] and o [rows, groups, D],
 * in shared memory, become states_out [..] and o_out [.., D], row r at index place(r). */
template <class At>
KV_DEVICE void merge_groups(int groups, const kv_state *states, const float *o, int rows, int D, float *o_out,
                            kv_state *states_out, At place) {
  __syncthreads(); /* the parts are there: all groups have written their states */
  for (int at = threadIdx.x; at < rows * D; at += blockDim.x) {
    const int r = at / D, d = at % D;
    kv_state all = {-INFINITY, 0};
    float sum = 0;
    for (int j = 0; j < groups; j++) all.m = fmaxf(all.m, states[r * groups + j].m);
    for (int j = 0; j < groups; j++) all.merge(states[r * groups + j], o[(r * groups + j) * D + d], sum);
    o_out[place(r) * D + d] = sum;
    if (d == 0) states_out[place(r)] = all;
  }
}

KV_DEVICE void merge_groups(int groups, const kv_state *states, const float *o, int rows, int D, float *o_out,
                            kv_state *states_out) {
  merge_groups(groups, states, o, rows, D, o_out, states_out, [](int r) { return r; });
}

/* Merges the splits of one row in one warp and writes the row's out and lse. part, states: o and state of the first
 * split; from split to split they are `step` floats and `apart` states apart. sink: the row's sink in log2 units, or
 * -inf. rotated: o is still rotated by the Hadamard matrix, as packed values of 4 bits are. */
template <class E>
static __device__ void finish(const float *part, int step, const kv_state *states, int apart, int splits, int D,
                              float sink, E *out, float *lse, bool rotated = false) {
  constexpr int AHEAD = 16; /* splits that are loaded at once; those past the last have weight 0 */
  const int lane = lane_id();
  float4 x[AHEAD];
  const auto load = [&](int i0, int d) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      x[i] = i0 + i < splits && d < D ? *reinterpret_cast<const float4 *>(part + (i0 + i) * step + d)
                                      : make_float4(0, 0, 0, 0);
  };
  load(0, 4 * lane); /* before the weights are computed, so that memory is not idle */
  kv_state mine[2], all = {sink, 0};
  float weight[2], sum = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    mine[i] = lane + 32 * i < splits ? states[(lane + 32 * i) * apart] : kv_state{-INFINITY, 0};
    all.m = fmaxf(all.m, mine[i].m);
  }
  all.m = lanes_max(all.m);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    weight[i] = all.weight(mine[i].m);
    sum += weight[i] * mine[i].d;
  }
  all.d = all.weight(sink) + lanes_sum(sum);
  if (lane == 0) *lse = all.lse();
  float o[KV_MOST_D_CUDA / 128][4] = {};
#pragma unroll
  for (int v = 0; v < KV_MOST_D_CUDA / 128; v++) {
    if (128 * v >= D) break;
    for (int i0 = 0; i0 < splits; i0 += AHEAD) {
      if (v > 0 || i0 > 0) load(i0, 128 * v + 4 * lane);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const float w = __shfl_sync(ALL_LANES, i0 < 32 ? weight[0] : weight[1], i0 % 32 + i);
        o[v][0] += w * x[i].x, o[v][1] += w * x[i].y, o[v][2] += w * x[i].z, o[v][3] += w * x[i].w;
      }
    }
  }
  if (rotated) hadamard<4, 32, KV_MOST_D_CUDA / 128>(o, D);
  const float over = all.normalize();
#pragma unroll
  for (int v = 0; v < KV_MOST_D_CUDA / 128; v++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int d = 128 * v + 4 * lane + i;
      if (d < D) out[d] = from_float<E>(o[v][i] * over);
    }
}

/* Where the results of attend or decode go. T is 1 for decode. */
struct Outputs {
  int64_t B, H, Hkv, T, D;
  const float *sinks; /* [H] sink logits, or NULL */
  void *out;          /* [B, T, H, D] */
  float *lse;         /* [B, H, T] */
  bool rotated;       /* o is still rotated by the Hadamard matrix, as packed values of 4 bits are */
};

constexpr int COMBINE_WARPS = 4;

/* Merges the splits of all rows, one row a warp. A tile whose count is 0 has no splits, and its rows are left alone. */
template <class E>
static __global__ void __launch_bounds__(COMBINE_WARPS * 32) combine_kernel(const Parts x, const Outputs y) {
  const int kv_head = block_head(), G = (int)y.H / (int)y.Hkv, r = blockIdx.x * COMBINE_WARPS + warp_id();
  await_kernels_before();
  if (kv_head >= y.B * y.Hkv || r >= y.T * G) return;
  const int64_t b = kv_head / (int)y.Hkv, t = r / G, head = kv_head % (int)y.Hkv * G + r % G;
  const int64_t tile = (int64_t)kv_head * x.tiles + r / x.rows, at = tile * x.splits * x.rows + r % x.rows;
  const int splits = (int)x.count[tile];
  if (splits == 0) return;
  const float sink = y.sinks ? y.sinks[head] * LOG2E : -INFINITY;
  finish<E>(x.o + at * y.D, x.rows * (int)y.D, x.states + at, x.rows, splits, (int)y.D, sink,
            static_cast<E *>(y.out) + ((b * y.T + t) * y.H + head) * y.D, y.lse + (b * y.H + head) * y.T + t,
            y.rotated);
}

template <class E>
static int combine(const Parts &x, const Outputs &y, void *stream) {
  const dim3 grid = grid_of((y.T * (y.H / y.Hkv) + COMBINE_WARPS - 1) / COMBINE_WARPS, y.B * y.Hkv);
  return launch_early<combine_kernel<E>>(grid, COMBINE_WARPS * 32, 0, stream, x, y);
}
#endif
