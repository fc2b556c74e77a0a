/* Chunk attention over the slots [stored | new] on a CPU, for attend and the ops that also observe.
 *
 * A task computes some steps (query positions) of one (b, kv head), for all G query heads of the group, which share the
 * packed keys and values. The outer loop goes over blocks of keys, the inner one over tiles of query rows, so each key
 * is packed once per task. Blocks that no row of a tile sees are skipped, and only blocks on the causal diagonal are
 * masked.
 *
 * If a chunk is short, the columns (slots) are cut into splits, too, and each row's states of the splits are merged in
 * order. Splits depend on the shapes and the lengths of heads, not on the number of threads. If a head has very few
 * rows, keys and values are read in place (stream.h), as in decode. */
#ifndef KVEVICT_ATTEND_H
#define KVEVICT_ATTEND_H
#include <stdatomic.h>

#include "rows.h"
#include "stream.h"

enum {
  FEW = 16,           /* the most rows of a head for which keys and values are read in place: packing would cost more */
  SHORT = 64,         /* the most steps of a chunk whose columns are cut into splits */
  TASKS = 32,         /* columns are cut to get about this many tasks */
  COLUMNS = 4 * KEYS, /* the fewest columns of a split, unless keys and values are read in place */
};

typedef struct {
  const kv_attend *a;
  int64_t steps;        /* number of steps of a task */
  int64_t most;         /* number of columns of the longest head */
  int64_t splits, span; /* splits per head and columns per split; 1 and 0 if columns are not cut */
  int few;              /* whether keys and values are read in place */
  kv_stream stream;     /* describes a head's rows; every worker allocates its own scratch for it */
  float *states;        /* [B, Hkv, splits, rows] softmax states (kv_state_in); NULL if columns are not cut */
  atomic_int failed;
} kv_attend_job;

typedef struct {
  int64_t b, h, n; /* n: number of columns */
  kv_queries query;
  kv_columns k, v;
  kv_bounds bounds;
} kv_attend_head;

static kv_attend_head kv_attend_head_of(const kv_attend *a, int64_t at) {
  const int64_t b = at / a->Hkv, h = at % a->Hkv, len = a->slots.len[at];
  const int64_t stop = a->stop ? a->stop[b] : a->S;
  kv_attend_head x = {.b = b, .h = h};
  x.query = kv_queries_of(a->dtype, a->D, a->H / a->Hkv, a->q, a->q_stride, b, h, a->scale, a->softcap);
  x.k = kv_head_columns(KV_KEYS, a->dtype, a->D, &a->slots, &a->chunk, b, h, a->Hkv, stop);
  x.v = kv_head_columns(KV_VALUES, a->dtype, a->D, &a->slots, &a->chunk, b, h, a->Hkv, stop);
  x.n = x.k.n;
  x.bounds = (kv_bounds){len - a->chunk.first[b] + a->S - a->T, a->stop ? x.n : len, x.n};
  return x;
}

/* Writes out and lse of row r of a head; `state` is the row's softmax state, already normalized. */
static void kv_attend_write(const kv_attend *a, const kv_attend_head *x, int64_t r, kv_state state) {
  const int64_t G = x->query.G, t = r / G, head = x->h * G + r % G, size = kv_size(a->dtype);
  kv_store_row(a->dtype, state.o, (char *)a->out + ((x->b * a->T + t) * a->H + head) * a->D * size, a->D);
  a->lse[(x->b * a->H + head) * a->T + t] = KV_LN2 * kv_state_lse(state);
}

/* Normalizes the states of a task's rows and writes their out and lse; out is 0 where a row sees nothing. */
static void kv_attend_finish(const kv_attend *a, const kv_attend_head *head, kv_rows *x, int64_t t0, int64_t rows,
                             int64_t width) {
  for (int64_t r = 0; r < rows; r++) {
    const kv_state state = kv_state_from(x->state, width, r);
    const float over = *state.d == 0 ? 0 : 1 / *state.d;
    for (int64_t d = 0; d < width; d++) state.o[d] *= over;
    kv_attend_write(a, head, t0 * head->query.G + r, state);
  }
}

static void kv_attend_task(const kv_attend_job *job, kv_rows *x, int64_t at, int64_t t0, int64_t t1, int64_t split) {
  const kv_attend *a = job->a;
  const kv_attend_head head = kv_attend_head_of(a, at);
  const int64_t G = head.query.G, rows = (t1 - t0) * G, width = job->stream.width;
  const float *sinks = a->sinks && !job->states ? a->sinks + head.h * G : NULL;
  const int64_t c0 = split * job->span, c1 = job->states ? kv_min(head.n, c0 + job->span) : head.n;
  if (job->states && c0 >= head.n) return;
  kv_rows_start(x, &head.query, t0, rows, sinks, width);
  kv_rows_run(x, &head.query, head.bounds, t0, rows, &head.k, &head.v, width, c0, c1);
  if (!job->states) {
    kv_attend_finish(a, &head, x, t0, rows, width);
    return;
  }
  const kv_state all = kv_state_in(job->states, at * job->splits + split, a->T * G, width);
  const kv_state to = kv_state_from(all, width, t0 * G);
  memcpy(to.o, x->state.o, (size_t)(rows * width) * sizeof *to.o);
  memcpy(to.m, x->state.m, (size_t)rows * sizeof *to.m);
  memcpy(to.d, x->state.d, (size_t)rows * sizeof *to.d);
}

/* Computes one split of a head with few rows: first the columns that every step sees, for all rows together; then, for
 * each step alone, the further columns that it sees. */
static void kv_attend_few(const kv_attend_job *job, const kv_stream *x, int64_t at, int64_t split) {
  const kv_attend_head head = kv_attend_head_of(job->a, at);
  const int64_t G = head.query.G, c0 = split * job->span, c1 = kv_min(head.n, c0 + job->span);
  const int64_t every = kv_min(c1, kv_max(c0, kv_seen(head.bounds, 0)));
  const kv_state state = kv_state_in(job->states, at * job->splits + split, x->rows, x->width);
  if (c0 >= head.n) return;
  kv_stream_load(x, &head.query, 0, x->rows, &head.k);
  kv_state_start(state, x->rows, x->width);
  kv_stream_run(x, head.query.cap, &head.k, &head.v, c0, every, 0, x->rows, state, NULL, 0);
  for (int64_t t = 0; t < job->a->T; t++) {
    const int64_t seen = kv_min(c1, kv_seen(head.bounds, t));
    kv_stream_run(x, head.query.cap, &head.k, &head.v, every, seen, t * G, (t + 1) * G, state, NULL, 0);
  }
}

/* Runs tasks begin .. end - 1. The last steps see the most columns and come first, so that no thread starts a long task
 * when the others are done. */
static void kv_attend_body(void *ctx, int64_t begin, int64_t end) {
  kv_attend_job *job = ctx;
  const kv_attend *a = job->a;
  const int64_t pieces = a->B * a->Hkv * job->splits, last = (a->T - 1) / job->steps;
  kv_rows x;
  kv_stream stream = job->stream;
  void *memory =
      job->few ? kv_stream_alloc(&stream) : kv_rows_alloc(&x, kv_min(job->steps, a->T) * (a->H / a->Hkv), a->D, 1);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) {
    const int64_t t0 = (last - i / pieces) * job->steps, at = i % pieces / job->splits, split = i % job->splits;
    if (job->few)
      kv_attend_few(job, &stream, at, split);
    else
      kv_attend_task(job, &x, at, t0, kv_min(a->T, t0 + job->steps), split);
  }
  free(memory);
}

/* Merges each row's states of all splits and writes the row's out and lse. */
static void kv_attend_combine_body(void *ctx, int64_t begin, int64_t end) {
  const kv_attend_job *job = ctx;
  const kv_attend *a = job->a;
  const int64_t rows = a->T * (a->H / a->Hkv), width = job->stream.width;
  float m, d, o[KV_MOST_D];
  const kv_state state = {o, &m, &d};
  for (int64_t i = begin; i < end; i++) {
    const kv_attend_head head = kv_attend_head_of(a, i / rows);
    const int64_t r = i % rows, G = head.query.G;
    const float sink = a->sinks ? a->sinks[head.h * G + r % G] * KV_LOG2E : -INFINITY;
    const kv_state first = kv_state_in(job->states, i / rows * job->splits, rows, width);
    kv_state_merge(kv_state_from(first, width, r), rows * (width + 2), (head.n + job->span - 1) / job->span, width,
                   sink, state);
    kv_state_normalize(state, width);
    if (job->few) kv_stream_order(&job->stream, 1, o);
    kv_attend_write(a, &head, r, state);
  }
}

/* Decides how the work is cut into tasks. The cut of columns depends on the shapes and the lengths of heads alone. */
static void kv_attend_cut(kv_attend_job *job, int64_t heads, int64_t rows) {
  const kv_attend *a = job->a;
  for (int64_t i = 0; i < heads; i++) job->most = kv_max(job->most, kv_attend_head_of(a, i).n);
  job->steps = kv_task_steps(heads, a->T, rows / a->T, a->D);
  job->splits = 1, job->span = 0, job->few = rows <= FEW;
  if (job->few) {
    job->steps = a->T, job->span = SPLIT;
  } else if (a->T <= SHORT) {
    const int64_t steps = kv_max(192 / (rows / a->T), 1), tasks = heads * ((a->T + steps - 1) / steps);
    const int64_t splits = kv_min(TASKS / tasks, job->most / COLUMNS);
    if (splits > 1) job->steps = steps, job->span = kv_round_up((job->most + splits - 1) / splits, KEYS);
  }
  if (job->span) job->splits = kv_max((job->most + job->span - 1) / job->span, 1);
}

static kv_status kv_attend_rows(const kv_attend *a) {
  const int64_t heads = a->B * a->Hkv, rows = heads ? a->T * (a->H / a->Hkv) : 0;
  if (heads == 0 || a->T == 0) return KV_OK;
  kv_attend_job job = {.a = a, .stream = kv_stream_of(a->dtype, a->D, rows, &a->slots)};
  kv_attend_cut(&job, heads, rows);
  if (job.span) {
    job.states = malloc((size_t)(heads * job.splits * rows * (job.stream.width + 2)) * sizeof *job.states);
    if (!job.states) return KV_NO_MEMORY;
  }
  const int64_t tasks = heads * job.splits * ((a->T + job.steps - 1) / job.steps);
  kv_parallel_for(tasks, job.few ? kv_stream_grain(&job.stream, job.most) : 1, kv_attend_body, &job);
  if (job.states && !job.failed)
    kv_parallel_for(heads * rows, kv_max(1, 64 / job.splits), kv_attend_combine_body, &job);
  free(job.states);
  return job.failed ? KV_NO_MEMORY : KV_OK;
}
#endif
