/* Computes score on Hopper, in 16 bits, with S^T = K Q^T by wgmma.
 *
 * A block holds the fragments of KEYS keys in registers and goes over tiles of rows, which TMA copies to a ring in
 * shared memory. While the terms of one tile are added, the next tile is multiplied. Terms are reduced by the
 * functions of score.cuh, as in score_cuda.cu. */
// budget: regs 168, smem 120832 (registers of a thread, bytes of a block)
#include "hopper.cuh"

#include <stdlib.h>

#include "score.cuh"

constexpr int TILE_ROWS = 64; /* query rows of a tile */

/* Sizes of a block: three warpgroups with 64 keys each. The keys' tile is read once, before the loop. A stage of the
 * ring has one tile of rows as ATOMS atoms (hopper.cuh). */
template <int D>
struct Sm90Tile {
  static constexpr int ROWS = TILE_ROWS, WARPS = 12, KEYS = WARPS * 16, THREADS = WARPS * 32, STAGES = 4;
  static constexpr int ATOMS = (D + ATOM - 1) / ATOM, STAGE = ROWS * ATOMS * ATOM; /* STAGE: numbers of a stage */
  static constexpr size_t SHARED =
      896 + (STAGES * STAGE + KEYS * D) * 2 + STAGES * (ROWS * sizeof(RowValues) + sizeof(uint64_t));
};

template <class E, int D>
static __global__ void __launch_bounds__(Sm90Tile<D>::THREADS, 1)
    score_sm90_kernel(const kv_score a, const Logits logits, const float power, const __grid_constant__ TensorMap q) {
  using X = Sm90Tile<D>;
  constexpr int NT = X::ROWS / 8;
  E *const ring = atom_aligned(shared_memory<E>()), *const k = ring + X::STAGES * X::STAGE;
  RowValues *const values = reinterpret_cast<RowValues *>(k + X::KEYS * D);
  uint64_t *const barriers = reinterpret_cast<uint64_t *>(values + X::STAGES * X::ROWS);
  const int head = block_head();
  if (head >= a.rows.B * a.rows.Hkv) return;
  const Observed x = observed<E>(a.rows, head);
  const int c0 = blockIdx.x * X::KEYS, column = c0 + warp_id() * 16, thread = threadIdx.x;
  const Rows all = seeing(a, x, c0);
  const int heads = all.heads.n, steps = X::ROWS / heads, tile = steps * heads; /* tile: used rows of a tile */
  const int tiles = (all.count + tile - 1) / tile * (x.G / heads);

  /* Starts copying tile t of the rows and returns the RowValues of this thread's row of the tile. Calls come in the
   * order of t. */
  int next_g = 0, next_row = 0;
  const auto load = [&](int t) {
    if (t >= tiles) return RowValues{};
    const Rows some = {all.head + next_g, all.from, all.count, all.heads};
    const int stage = t % X::STAGES, row = next_row;
    if (thread == 0) {
      barrier_expect(barriers + stage, X::ATOMS * tile * ATOM_BYTES);
#pragma unroll
      for (int i = 0; i < X::ATOMS; i++)
        copy_box(ring + stage * X::STAGE + i * X::ROWS * ATOM, q, barriers + stage, i * ATOM, some.head, some.step(row),
                 x.b);
    }
    next_row += tile;
    if (next_row >= all.count) next_row = 0, next_g += heads;
    return thread < tile ? row_values(a.rows, x, some, row + thread) : RowValues{};
  };
  int seen[3] = {}; /* how many keys this thread's rows of this tile and of the next two see */
  const auto keep = [&](int t, const RowValues &row) {
    seen[0] = seen[1], seen[1] = seen[2], seen[2] = row.seen;
    if (thread < X::ROWS) values[t % X::STAGES * X::ROWS + thread] = {row.lse * power, row.weight, row.seen};
  };

  if (thread == 0) {
    for (int i = 0; i < X::STAGES; i++) barrier_init(barriers + i);
    fence_proxy_async();
  }
  if (tiles) tile_load<E, D, X::KEYS, X::THREADS>(k, x.k, c0, a.rows.D);
  cp_async_commit();
  for (int t = 0; t < X::STAGES - 1; t++) keep(t, load(t));
  cp_async_wait<0>();
  __syncthreads(); /* K has arrived; the barriers are initialized */
  uint32_t keys[D / 16][4];
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    ldmatrix_x4(keys[i][0], keys[i][1], keys[i][2], keys[i][3],
                k + tile_at<E, D>(warp_id() * 16 + lane_id() % 16, 2 * i + lane_id() / 16));

  const auto multiply = [&](int t, float(&s)[1][NT][4]) {
    const uint32_t rows = operand(ring + t % X::STAGES * X::STAGE);
    if (t < tiles) barrier_wait(barriers + t % X::STAGES, t / X::STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++)
      wgmma<E>(s[0], keys[i], operand_on(rows, i / 4 * X::ROWS * ATOM_BYTES + i % 4 * 32), i > 0);
    wgmma_commit();
  };
  Group<1> group;
  float total[1][2] = {};
  int g = 0, row = 0;
  const auto add = [&](int t, float(&s)[1][NT][4], float(&next)[1][NT][4]) {
    /* All warps are done with the previous tile; this tile's RowValues are there. */
    const bool full = __syncthreads_and(thread >= X::ROWS || seen[0] >= c0 + X::KEYS);
    const RowValues later = load(t + X::STAGES - 1);
    multiply(t + 1, next);
    add_tile(a, total, s, values + t % X::STAGES * X::ROWS, logits, column + fragment_row(), full);
    keep(t + X::STAGES - 1, later);
    wgmma_wait<0>(next[0]); /* here, since ptxas would serialise products still running at the end of the loop's body */
    row += tile;
    if (row < all.count || g == x.G) return;
    add_heads(a, x, group, total, head, g, heads, column);
    total[0][0] = total[0][1] = 0, row = 0, g += heads;
  };
  float s[2][1][NT][4] = {};
  multiply(0, s[0]);
  wgmma_wait<0>(s[0][0]);
#pragma unroll 1
  for (int t = 0; t < tiles; t += 2) {
    add(t, s[0], s[1]);
    add(t + 1, s[1], s[0]);
  }
  /* Heads have no tile if no row sees the block's keys: their results are 0. */
  for (; g < x.G; g += heads) add_heads(a, x, group, total, head, g, heads, column);
}

/* Returns whether this kernel is to compute score: KVEVICT_WGMMA is 1, the GPU's compute capability is 9.0, numbers
 * have 16 bits and heads at most 128 dimensions. */
static bool wanted(const kv_score &a) {
  const char *const wish = getenv("KVEVICT_WGMMA");
  int device = 0, major = 0, minor = 0;
  return wish && wish[0] == '1' && a.rows.dtype != KV_F32 && a.rows.D <= 128 && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

int score_sm90(const kv_score &a, const Logits &logits, float power, void *stream) {
  if (!wanted(a)) return -1;
  const kv_observers &rows = a.rows;
  const uint32_t heads = (uint32_t)heads_together(a.reduce, a.group, (int)(rows.H / rows.Hkv));
  if (heads > TILE_ROWS) return -1;
  TensorMap q;
  const uint64_t size[4] = {(uint64_t)rows.D, (uint64_t)rows.H, (uint64_t)rows.R, (uint64_t)rows.B};
  const uint64_t stride[3] = {2 * (uint64_t)rows.q_stride[1], 2 * (uint64_t)rows.q_stride[2],
                              2 * (uint64_t)rows.q_stride[0]};
  const uint32_t box[4] = {ATOM, heads, TILE_ROWS / heads, 1};
  if (!tensor_map(&q, rows.dtype == KV_BF16, rows.q, size, stride, box)) return -1;
  return dispatch(rows.dtype, rows.D, [&](auto e, auto d) {
    using E = decltype(e);
    constexpr int D = decltype(d)::value;
    if constexpr (sizeof(E) == 4 || D > 128) {
      return -1;
    } else {
      using X = Sm90Tile<D>;
      const dim3 grid = grid_of((a.C + X::KEYS - 1) / X::KEYS, rows.B * rows.Hkv);
      return launch<score_sm90_kernel<E, D>>(grid, X::THREADS, X::SHARED, stream, a, logits, power, q);
    }
  });
}
