/* Loops on several threads, for the kernels. The host program's hook only starts workers; the ranges of a loop are
 * handed out here, so that all workers end at the same time although the work is uneven (causal rows, heads of unequal
 * length). */
#ifndef KVEVICT_PARALLEL_H
#define KVEVICT_PARALLEL_H
#include "kvevict.h"

/* Returns the number of threads that a loop may run on, at least 1. */
int kv_threads(void);

/* Calls body(ctx, begin, end) for disjoint ranges of at most `grain` items that cover 0..n, and returns when all are
 * done. A free worker takes the next range in ascending order. No result may depend on which worker ran a range. */
void kv_parallel_for(int64_t n, int64_t grain, kv_body body, void *ctx);
#endif
