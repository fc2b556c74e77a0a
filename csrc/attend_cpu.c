/* Chunk attention over [stored | new] on a CPU.
 *
 * A task is some steps of one (b, kv head), with the rows of all G query heads, which share the packed keys and values.
 * The outer loop goes over blocks of keys, the inner one over tiles of rows, so each key is packed once per task.
 * Blocks that no row of a tile sees are skipped, and only those on the diagonal are masked. */
#include <stdatomic.h>

#include "tile.h"

typedef struct {
  const kv_attend *a;
  int64_t steps; /* of a task */
  atomic_int failed;
} kv_attend_job;

/* out and lse of a task's rows: o / l, or 0 if the row sees nothing; lse = ln 2 * (m + log2 l). */
static void kv_attend_finish(const kv_attend *a, kv_rows *x, int64_t b, int64_t h, int64_t t0, int64_t rows,
                             int64_t width) {
  const int64_t G = a->H / a->Hkv, size = kv_size(a->dtype);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t t = t0 + r / G, head = h * G + r % G;
    const float over = x->l[r] == 0 ? 0 : 1 / x->l[r];
    float *o = x->o + r * width;
    for (int64_t d = 0; d < width; d++) o[d] *= over;
    kv_store_row(a->dtype, o, (char *)a->out + ((b * a->T + t) * a->H + head) * a->D * size, a->D);
    a->lse[(b * a->H + head) * a->T + t] = KV_LN2 * (x->m[r] + log2f(x->l[r]));
  }
}

static void kv_attend_task(const kv_attend *a, kv_rows *x, int64_t b, int64_t h, int64_t t0, int64_t t1) {
  const int64_t G = a->H / a->Hkv, rows = (t1 - t0) * G, width = kv_round_up(a->D, VL), at = b * a->Hkv + h;
  const int64_t stop = a->stop ? a->stop[b] : a->S, len = a->slots.len[at], size = kv_size(a->dtype);
  const kv_queries query = kv_queries_of(a->dtype, a->D, G, a->q, a->q_stride, b, h, a->scale, a->softcap);
  const kv_columns k = {a->dtype, a->D, kv_keys_of(&a->slots, &a->chunk, b, h, a->Hkv, stop, a->D, size)};
  const kv_columns v = {a->dtype, a->D, kv_values_of(&a->slots, &a->chunk, b, h, a->Hkv, stop, a->D, size)};
  const kv_bounds bounds = {len - a->chunk.first[b] + a->S - a->T, a->stop ? k.at.n : len, k.at.n};
  kv_rows_start(x, &query, t0, rows, a->sinks ? a->sinks + h * G : NULL, width);
  kv_rows_run(x, &query, bounds, t0, rows, &k, &v, width);
  kv_attend_finish(a, x, b, h, t0, rows, width);
}

/* The steps that see most come first, so that no thread starts a long task while the others are done. */
static void kv_attend_body(void *ctx, int64_t begin, int64_t end) {
  kv_attend_job *job = ctx;
  const kv_attend *a = job->a;
  const int64_t heads = a->B * a->Hkv, last = (a->T - 1) / job->steps;
  kv_rows x;
  void *memory = kv_rows_alloc(&x, kv_min(job->steps, a->T) * (a->H / a->Hkv), a->D, 1);
  if (!memory) {
    job->failed = 1;
    return;
  }
  for (int64_t i = begin; i < end; i++) {
    const int64_t t0 = (last - i / heads) * job->steps, head = i % heads;
    kv_attend_task(a, &x, head / a->Hkv, head % a->Hkv, t0, kv_min(a->T, t0 + job->steps));
  }
  free(memory);
}

kv_status KV_OP(attend)(const kv_attend *a) {
  const int64_t heads = a->B * a->Hkv;
  if (heads == 0 || a->T == 0) return KV_OK;
  kv_attend_job job = {a, kv_task_steps(heads, a->T, a->H / a->Hkv, a->D), 0};
  kv_parallel_for(heads * ((a->T + job.steps - 1) / job.steps), 1, kv_attend_body, &job);
  return job.failed ? KV_NO_MEMORY : KV_OK;
}
