/* Score of every alive slot on a CPU: the attention weights of observing rows, reduced over the rows (score.h). */
#include "score.h"

kv_status KV_OP(score)(const kv_score *a) {
  const kv_reduction how = kv_score_how(a);
  return kv_reduce_rows(&a->rows, a, &how);
}
