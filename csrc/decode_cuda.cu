/* Computes one decode step on a GPU. The step is limited by memory bandwidth, so a block reads each key and value
 * once for all query heads of the GQA group. The slots of a head are cut into splits, which depend only on the
 * number of slots, the shapes and the GPU, and are merged in order: results have the same bits every time.
 *
 * Three kernels compute attention:
 *   lanes.cuh         GQA groups of up to 2 heads in 16 bits, if slots are not packed; of up to 4 heads in fp32
 *   decode_ring.cuh   all other groups in 16 bits: every warp multiplies its own tiles on tensor cores
 *   decode_tiles.cuh  all other groups in fp32: the query heads are the rows of a tile
 * In lanes.cuh the block that finishes last for a head merges the head's splits. In the other two files combine_kernel
 * (state.cuh) does, except where every head has one split (Plan::whole). Arithmetic is fp32, logits are in log2
 * units. */
// budget: regs 255, smem 98400 (registers of a thread, bytes of a block)
#include "decode_ring.cuh"
#include "decode_tiles.cuh"
#include "lanes.cuh"

/* Packs the new key (warp 0) and value (warp 1) of kv head blockIdx.x, given in fp32, before the next kernel reads
 * them. */
static __global__ void __launch_bounds__(64) append_kernel(const kv_decode a) {
  append_packed<float>(a, blockIdx.x, a.slots.offset[blockIdx.x] + a.slots.len[blockIdx.x], warp_id() == 0);
}

/* Computes one column of a kv head's probs: the mean of exp(logit - lse) over its query heads. logit: [B, Hkv, G, C]
 * in log2 units. */
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
