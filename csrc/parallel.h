/* Threads, as kernels use them. The host program's hook only starts workers; the work is dealt out here, so that uneven
 * work (causal rows, ragged heads) ends at the same time on all of them. */
#ifndef KVEVICT_PARALLEL_H
#define KVEVICT_PARALLEL_H
#include "kvevict.h"

/* How many threads loops may run on, at least 1. */
int kv_threads(void);

/* Calls body(ctx, begin, end) for disjoint ranges of at most `grain` items that cover 0..n; free workers take the next
 * range in ascending order. Returns when all are done. No result may depend on the worker that ran a range. */
void kv_parallel_for(int64_t n, int64_t grain, kv_body body, void *ctx);
#endif
