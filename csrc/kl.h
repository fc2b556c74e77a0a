/* What kl and kl_grad share: the sums that target and attention of a query head are divided by. */
#ifndef KVEVICT_KL_H
#define KVEVICT_KL_H
#include "observe.h"

typedef struct {
  int64_t n;                  /* columns that count */
  const float *target, *paid; /* [n] */
  double target_sum, paid_sum;
  int none; /* there is nothing to compare */
} kv_kl_of;

static inline kv_kl_of kv_kl_head(const float *target, int64_t N, const float *paid, int64_t C, int64_t head,
                                  int64_t n) {
  kv_kl_of x = {kv_min(n, N), target + head * N, paid + head * C, 0, 0, 0};
  for (int64_t c = 0; c < x.n; c++) x.target_sum += x.target[c], x.paid_sum += x.paid[c];
  x.none = x.target_sum == 0 || x.paid_sum == 0;
  return x;
}
#endif
