/* A query head's target and mean attention, and the sums by which they are divided; shared by kl and kl_grad. */
#ifndef KVEVICT_KL_H
#define KVEVICT_KL_H
#include "observe.h"

typedef struct {
  int64_t n;                       /* number of slots that are compared: min(N, alive slots) */
  const float *target, *attention; /* [n] of one query head */
  double target_sum, attention_sum;
  int empty; /* whether one of the sums is 0: then the loss and its gradients are 0 */
} kv_kl_of;

static inline kv_kl_of kv_kl_head(const float *target, int64_t N, const float *attention, int64_t C, int64_t head,
                                  int64_t n) {
  kv_kl_of x = {kv_min(n, N), target + head * N, attention + head * C, 0, 0, 0};
  for (int64_t c = 0; c < x.n; c++) x.target_sum += x.target[c], x.attention_sum += x.attention[c];
  x.empty = x.target_sum == 0 || x.attention_sum == 0;
  return x;
}
#endif
