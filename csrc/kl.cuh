/* The sums by which kl and kl_grad divide the target and the mean attention of a query head. */
#ifndef KV_KL_CUH
#define KV_KL_CUH
#include "observe.cuh"

constexpr int KL_THREADS = 256;

struct KlHead {
  int n;                           /* number of slots in the KL divergence */
  const float *target, *attention; /* [n] */
  float target_sum, attention_sum;
  bool empty; /* whether one of the sums is 0: then the loss and its gradients are 0 */
};

/* Sums target and mean attention of query head `head` = b * H + h. All threads of the block must call it. red: [32]
 * in shared memory, for the reductions. */
KV_DEVICE KlHead kl_head(const kv_observers &rows, const float *target, int64_t N, const float *attention, int64_t C,
                         int64_t head, float *red) {
  const int b = head / rows.H, h = head % rows.H / (rows.H / rows.Hkv);
  const int alive = rows.slots.len[b * rows.Hkv + h] + rows.stop[b] - rows.chunk.first[b];
  KlHead x = {min(alive, (int)N), target + head * N, attention + head * C, 0, 0, false};
  float target_part = 0, attention_part = 0;
  for (int c = threadIdx.x; c < x.n; c += KL_THREADS) target_part += x.target[c], attention_part += x.attention[c];
  x.target_sum = block_sum(target_part, red);
  x.attention_sum = block_sum(attention_part, red);
  x.empty = x.target_sum == 0 || x.attention_sum == 0;
  return x;
}
#endif
