/* CAOTE (eviction by output error) on a CPU: the error of a kv head's output when one slot is removed, with the pooled
 * score in place of the attention weight.
 *
 * Pass 1 sums each head's scores. Pass 2 computes each split's part of the head's mean value, and pass 3 the sum of
 * these parts. Pass 4 computes each slot's error from its value's distance to the mean. Splits do not depend on the
 * number of threads. Sums of more than 128 terms are pairwise, so that rounding does not grow with n. */
#include <float.h>

#include "tile.h"

enum { SPLIT = 128 };

typedef struct {
  const kv_refine *a;
  int64_t splits; /* number of splits of the longest head */
  float *sum;     /* [B, Hkv] the sums of scores */
  float *mean;    /* [B, Hkv, splits, D] parts of the mean; kv_refine_means turns a head's first into the mean */
} kv_refine_job;

static kv_columns kv_refine_values(const kv_refine *a, int64_t at) {
  const int64_t b = at / a->Hkv;
  return kv_head_columns(KV_VALUES, a->dtype, a->D, &a->slots, &a->chunk, b, at % a->Hkv, a->Hkv, a->stop[b]);
}

static float kv_pairwise_sum(const float *x, int64_t n) {
  const int64_t half = kv_round_up(n / 2, SPLIT);
  if (n > SPLIT) return kv_pairwise_sum(x, half) + kv_pairwise_sum(x + half, n - half);
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += x[i];
  return sum;
}

/* Returns slot c's share hn of the head's scores, as kv_refine in kvevict.h defines it. */
static float kv_refine_share(const kv_refine_job *job, int64_t at, int64_t n, int64_t c) {
  return job->sum[at] == 0 ? 1 / (float)n : job->a->score[at * job->a->C + c] / job->sum[at];
}

static void kv_refine_sums(void *ctx, int64_t begin, int64_t end) {
  const kv_refine_job *job = ctx;
  for (int64_t at = begin; at < end; at++)
    job->sum[at] = kv_pairwise_sum(job->a->score + at * job->a->C, kv_refine_values(job->a, at).n);
}

static void kv_refine_splits(void *ctx, int64_t begin, int64_t end) {
  const kv_refine_job *job = ctx;
  float row[KV_MOST_D];
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i / job->splits, c0 = i % job->splits * SPLIT;
    const kv_columns v = kv_refine_values(job->a, at);
    float *restrict mean = job->mean + i * v.D;
    memset(mean, 0, (size_t)v.D * sizeof *mean);
    for (int64_t c = c0; c < kv_min(c0 + SPLIT, v.n); c++) {
      const float share = job->a->fast ? 1 / (float)v.n : kv_refine_share(job, at, v.n, c);
      const float *x = kv_column_floats(&v, c, row);
      for (int64_t d = 0; d < v.D; d++) mean[d] += share * x[d];
    }
  }
}

static void kv_refine_means(void *ctx, int64_t begin, int64_t end) {
  const kv_refine_job *job = ctx;
  const int64_t D = job->a->D, n = job->splits;
  for (int64_t at = begin; at < end; at++) {
    float *mean = job->mean + at * n * D;
    for (int64_t step = 1; step < n; step *= 2)
      for (int64_t i = 0; i + step < n; i += 2 * step)
        for (int64_t d = 0; d < D; d++) mean[i * D + d] += mean[(i + step) * D + d];
  }
}

static void kv_refine_errors(void *ctx, int64_t begin, int64_t end) {
  const kv_refine_job *job = ctx;
  const kv_refine *a = job->a;
  float row[KV_MOST_D];
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i / job->splits, c0 = i % job->splits * SPLIT;
    const kv_columns v = kv_refine_values(a, at);
    float *out = a->out + at * a->C;
    for (int64_t c = c0; c < kv_min(c0 + SPLIT, v.n); c++) {
      const float share = kv_refine_share(job, at, v.n, c), left = 1 - share;
      const float by = kv_distance(kv_column_floats(&v, c, row), job->mean + at * job->splits * a->D, a->D, 2);
      out[c] = left < 1e-6f ? FLT_MAX : share / left * (a->squared ? by * by : by);
    }
    for (int64_t c = kv_max(c0, v.n); c < kv_min(c0 + SPLIT, a->C); c++) out[c] = 0;
  }
}

kv_status KV_OP(refine)(const kv_refine *a) {
  const int64_t heads = a->B * a->Hkv, grain = kv_max(1, 32768 / (SPLIT * a->D));
  kv_refine_job job = {a, (a->C + SPLIT - 1) / SPLIT, NULL, NULL};
  if (heads == 0 || a->C == 0) return KV_OK;
  job.sum = malloc((size_t)(heads * (1 + job.splits * a->D)) * sizeof *job.sum);
  if (!job.sum) return KV_NO_MEMORY;
  job.mean = job.sum + heads;
  /* A thread gets heads with about 16 thousand scores or more: waking it costs as much as adding 16 thousand. */
  kv_parallel_for(heads, 1 + 16384 / (a->C + 1), kv_refine_sums, &job);
  kv_parallel_for(heads * job.splits, grain, kv_refine_splits, &job);
  kv_parallel_for(heads, 1 + 16384 / (job.splits * a->D), kv_refine_means, &job);
  kv_parallel_for(heads * job.splits, grain, kv_refine_errors, &job);
  free(job.sum);
  return KV_OK;
}
