/* Selects the slots to keep on a GPU; the index equals the CPU's, slot for slot. One block per head: scores become
 * sort keys of 32 bits, and three histograms over 11 bits each find the sort key of the last kept slot. Then each
 * warp counts the kept slots of its split and writes its part of the index. Atomics only count, so their order does
 * not matter.
 *
 * Shared memory holds a histogram and, if they fit, a head's sort keys.
 *
 * budget: regs 64, smem 90256 (registers of a thread, bytes of a block) */
#include "kvevict.h"
#include "launch.cuh"
#include "warp.cuh"

constexpr int THREADS = 1024, BITS = 11, BINS = 1 << BITS, CACHED = 20480;

struct Shared {
  int count[BINS], scratch[32], bin, rank;
  uint32_t key[]; /* sort keys of a head, if at most CACHED */
};

/* Returns the sort key of a score: a larger score has a larger key. The key of NaN is 0, below that of -inf; -0 and
 * +0 have one key. */
static __device__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0;
  return bits >> 31 ? 0x80000000u - magnitude : 0x80000000u + magnitude;
}

/* Sort keys of the n slots of a head that are not protected. */
struct Keys {
  const float *score;
  const uint32_t *cached; /* [n] sort keys in shared memory, or NULL: computed from the scores */
  int n;
  __device__ uint32_t operator[](int i) const { return cached ? cached[i] : key_of(score[i]); }
};

/* Returns the sort key of rank `rank`, 1 .. n; the largest key has rank 1. *equal becomes the number of slots with
 * this key among the first `rank`. As on the CPU, the last histogram shares one bit with the one before it. */
static __device__ uint32_t key_at_rank(Keys keys, int rank, Shared *shared, int *equal) {
  const int t = threadIdx.x;
  uint32_t prefix = 0, known = 0; /* prefix: known bits of the key; known: mask of these bits */
  for (int shift = 32 - BITS; known != 0xffffffffu; shift = shift > BITS ? shift - BITS : 0) {
    for (int i = t; i < BINS; i += THREADS) shared->count[i] = 0;
    __syncthreads();
    for (int i = t; i < keys.n; i += THREADS) {
      const uint32_t key = keys[i];
      if ((key & known) == prefix) atomicAdd(&shared->count[key >> shift & (BINS - 1)], 1);
    }
    __syncthreads();
    const int top = BINS - 1 - 2 * t; /* the upper of this thread's two bins; thread 0 has the largest keys */
    const int upper = shared->count[top], both = upper + shared->count[top - 1];
    int total;
    const int before = block_sum_before(both, shared->scratch, &total);
    if (before < rank && rank <= before + both) {
      const bool in_lower = rank > before + upper;
      shared->bin = top - in_lower;
      shared->rank = rank - before - (in_lower ? upper : 0);
    }
    __syncthreads();
    prefix |= (uint32_t)shared->bin << shift;
    known |= (uint32_t)(BINS - 1) << shift;
    rank = shared->rank;
  }
  *equal = rank;
  return prefix;
}

/* Writes to index, in ascending order, base + i for each of keys[i] above `bar` and for the first `equal` of those
 * equal to `bar`. scratch [32]: in shared memory. */
static __device__ void write_kept(Keys keys, uint32_t bar, int equal, int base, int32_t *index, int *scratch) {
  const int split = (keys.n + THREADS - 1) / THREADS * 32, lane = lane_id();
  /* the shuffle tells the compiler that `warp` is equal in all lanes */
  const int warp = __shfl_sync(ALL_LANES, warp_id(), 0);
  const int begin = min(keys.n, warp * split), end = min(keys.n, begin + split);
  int above = 0, ties = 0; /* numbers of keys above and equal to `bar` in the warp's split */
  for (int at = begin; at < end; at += 32) {
    const int i = at + lane;
    const uint32_t key = i < end ? keys[i] : 0;
    above += __popc(__ballot_sync(ALL_LANES, i < end && key > bar));
    ties += __popc(__ballot_sync(ALL_LANES, i < end && key == bar));
  }
  int total;
  /* From here on, the counts of all warps before this one: */
  above = __shfl_sync(ALL_LANES, block_sum_before(lane ? 0 : above, scratch, &total), 0);
  ties = __shfl_sync(ALL_LANES, block_sum_before(lane ? 0 : ties, scratch, &total), 0);
  int to = above + min(ties, equal);
  const uint32_t earlier = (1u << lane) - 1;
  for (int at = begin; at < end; at += 32) {
    const int i = at + lane;
    const uint32_t key = i < end ? keys[i] : 0;
    const bool tie = i < end && key == bar;
    const uint32_t tied = __ballot_sync(ALL_LANES, tie);
    const bool keep = (i < end && key > bar) || (tie && ties + __popc(tied & earlier) < equal);
    const uint32_t kept = __ballot_sync(ALL_LANES, keep);
    if (keep) index[to + __popc(kept & earlier)] = base + i;
    to += __popc(kept);
    ties += __popc(tied);
  }
}

static __global__ void __launch_bounds__(THREADS) select_kernel(const kv_select a, int cached) {
  Shared *shared = shared_memory<Shared>();
  const int64_t head = blockIdx.x, b = head / a.Hkv;
  const int n = a.n[head], keep = a.keep[head], t = threadIdx.x;
  const int first = min(a.protect_first[b], n);           /* slots 0 .. first - 1 are protected */
  const int last = n - min(a.protect_last[b], n - first); /* slots last .. n - 1 are protected */
  const int wanted = keep - first - (n - last);           /* number of other slots to keep */
  int32_t *index = a.index + head * a.K;
  Keys keys = {a.score + head * a.C + first, nullptr, last - first};
  if (keys.n <= cached) {
    for (int i = t; i < keys.n; i += THREADS) shared->key[i] = key_of(keys.score[i]);
    keys.cached = shared->key;
    __syncthreads();
  }
  uint32_t bar = 0; /* no key is below 0, so all are kept unless fewer are wanted */
  int equal = keys.n;
  if (wanted < keys.n) bar = wanted > 0 ? key_at_rank(keys, wanted, shared, &equal) : 0xffffffffu;
  for (int i = t; i < first; i += THREADS) index[i] = i;
  write_kept(keys, bar, equal, first, index + first, shared->scratch);
  for (int i = last + t; i < n; i += THREADS) index[keep - n + i] = i;
  for (int64_t i = keep + t; i < a.K; i += THREADS) index[i] = -1;
}

int64_t kv_select_cuda_scratch(const kv_select *) { return 0; }

int kv_select_cuda(const kv_select *a, void *, void *stream) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0 || a->K == 0) return 0;
  const int cached = (int)(a->C < CACHED ? a->C : CACHED);
  return launch<select_kernel>(dim3((unsigned)heads), THREADS, sizeof(Shared) + 4 * cached, stream, *a, cached);
}
