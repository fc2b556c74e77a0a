/* What kl and kl_grad share: which columns of a query head count, and the sums that target and attention are divided
 * by. A block belongs to one query head, blockIdx.y = b * H + head. */
#ifndef KV_KL_CUH
#define KV_KL_CUH
#include "observe.cuh"

constexpr int KL_THREADS = 256;

struct KlHead {
  int n; /* columns that count */
  const float *target, *paid;
  float target_sum, paid_sum;
  bool none; /* there is nothing to compare */
};

/* red: [32] shared. */
static __device__ __forceinline__ KlHead kl_head(const kv_observers &rows, const float *target, int64_t N,
                                                 const float *paid, int64_t C, int64_t head, float *red) {
  const int b = head / rows.H, h = head % rows.H / (rows.H / rows.Hkv);
  const int alive = rows.slots.len[b * rows.Hkv + h] + rows.stop[b] - rows.chunk.first[b];
  KlHead x = {min(alive, (int)N), target + head * N, paid + head * C, 0, 0, false};
  float wanted = 0, had = 0;
  for (int c = threadIdx.x; c < x.n; c += KL_THREADS) wanted += x.target[c], had += x.paid[c];
  x.target_sum = block_sum(wanted, red);
  x.paid_sum = block_sum(had, red);
  x.none = x.target_sum == 0 || x.paid_sum == 0;
  return x;
}
#endif
