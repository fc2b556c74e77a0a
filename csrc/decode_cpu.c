/* One decode step on a CPU. It is limited by memory bandwidth, so each stored row is read once, in place, for all G
 * query heads of its group. The slots of a head are cut into splits that do not depend on the number of threads. Pass 1
 * writes the new row and computes each split's softmax state; pass 2 merges the states in order and, if probs are
 * wanted, turns the stored logits into attention weights. */
#include <stdatomic.h>

#include "stream.h"

typedef struct {
  const kv_decode *a;
  kv_stream shape;      /* describes a group's rows; every worker allocates its own scratch for it */
  int64_t splits, most; /* of the longest head: number of splits; number of slots, rounded up to a multiple of VL */
  float *states;        /* [B, Hkv, splits, G] softmax states (kv_state_in) */
  float *logit;         /* [B, Hkv, G, most] logits in log2 units; NULL if probs are not wanted */
  atomic_int failed;
} kv_decode_job;

/* Return how many slots head `at` has in the prefix, and how many in prefix and own slots together, without the new
 * one. */
static int64_t kv_decode_shared(const kv_decode *a, int64_t at) { return a->prefix.len ? a->prefix.len[at] : 0; }
static int64_t kv_decode_slots(const kv_decode *a, int64_t at) { return kv_decode_shared(a, at) + a->slots.len[at]; }

/* Returns the keys or values [prefix | own | new] of head `at`. The new row must already be stored after the own
 * ones. */
static kv_columns kv_decode_columns(const kv_decode *a, int64_t at, int values) {
  const kv_slots *own = &a->slots, *prefix = &a->prefix;
  const int64_t len = kv_decode_shared(a, at), offset = len ? prefix->offset[at] : 0;
  return kv_stored_columns(a->dtype, a->D, values ? own->v_kind : own->k_kind, values ? NULL : kv_centre(own, at, a->D),
                           values ? prefix->v : prefix->k, offset, len, values ? own->v : own->k, own->offset[at],
                           own->len[at] + 1);
}

static void kv_decode_append(const kv_decode *a, int64_t b, int64_t h, int64_t row) {
  const int64_t size = kv_size(a->dtype), *ks = a->chunk.k_stride, *vs = a->chunk.v_stride;
  const kv_slots *to = &a->slots;
  kv_row_store(a->dtype, a->D, (const char *)a->chunk.k + (b * ks[0] + h * ks[1]) * size, to->k_kind,
               kv_centre(to, b * a->Hkv + h, a->D), (char *)to->k + row * kv_row_bytes(to->k_kind, a->dtype, a->D));
  kv_row_store(a->dtype, a->D, (const char *)a->chunk.v + (b * vs[0] + h * vs[1]) * size, to->v_kind, NULL,
               (char *)to->v + row * kv_row_bytes(to->v_kind, a->dtype, a->D));
  a->slots.pos[row] = a->chunk.pos[b];
}

static void kv_decode_task(const kv_decode_job *job, const kv_stream *x, int64_t b, int64_t h, int64_t split) {
  const kv_decode *a = job->a;
  const int64_t at = b * a->Hkv + h, n = kv_decode_slots(a, at) + 1, c0 = split * SPLIT, c1 = kv_min(n, c0 + SPLIT);
  if (c0 >= n) return;
  if (c1 == n) kv_decode_append(a, b, h, a->slots.offset[at] + a->slots.len[at]);
  const kv_queries query = kv_queries_of(a->dtype, a->D, x->rows, a->q, a->q_stride, b, h, a->scale, a->softcap);
  const kv_columns k = kv_decode_columns(a, at, 0), v = kv_decode_columns(a, at, 1);
  const kv_state state = kv_state_in(job->states, at * job->splits + split, x->rows, x->width);
  kv_stream_load(x, &query, 0, &k);
  kv_state_start(state, x->rows, x->width);
  kv_stream_run(x, query.cap, &k, &v, c0, c1, 0, x->rows, state,
                job->logit ? job->logit + at * x->rows * job->most : NULL, job->most);
}

static void kv_decode_body(void *ctx, int64_t begin, int64_t end) {
  kv_decode_job *job = ctx;
  const int64_t Hkv = job->a->Hkv;
  kv_stream x = job->shape;
  void *memory = kv_stream_alloc(&x);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++)
    kv_decode_task(job, &x, i / job->splits / Hkv, i / job->splits % Hkv, i % job->splits);
  free(memory);
}

/* Pass 2: writes probs of one split of one head. For split 0 it also writes out, lse and the zeros of probs after the
 * last slot. */
static void kv_decode_finish(const kv_decode_job *job, int64_t b, int64_t h, int64_t split) {
  const kv_decode *a = job->a;
  const int64_t G = job->shape.rows, width = job->shape.width, at = b * a->Hkv + h, n = kv_decode_slots(a, at) + 1;
  const int64_t c0 = split * SPLIT, columns = kv_min(n - c0, SPLIT), size = kv_size(a->dtype);
  float m, d, p[SPLIT] = {0}, o[KV_MOST_D];
  const kv_state first = kv_state_in(job->states, at * job->splits, G, width), state = {split == 0 ? o : NULL, &m, &d};
  if (columns <= 0) return;
  for (int64_t g = 0; g < G; g++) {
    const int64_t head = b * a->H + h * G + g;
    const float sink = a->sinks ? a->sinks[h * G + g] * KV_LOG2E : -INFINITY;
    kv_state_merge(kv_state_from(first, width, g), G * (width + 2), (n + SPLIT - 1) / SPLIT, width, sink, state);
    const float lse = kv_state_lse(state), from = lse == -INFINITY ? 0 : lse;
    if (split == 0) {
      kv_state_normalize(state, width);
      kv_stream_order(&job->shape, 1, o);
      kv_store_row(a->dtype, o, (char *)a->out + head * a->D * size, a->D);
      a->lse[head] = KV_LN2 * lse;
    }
    for (int64_t c = 0; a->probs && c < columns; c += VL)
      vf_store(p + c, vf_load(p + c) + vf_exp2(vf_load(job->logit + (at * G + g) * job->most + c0 + c) - from));
  }
  if (!a->probs) return;
  float *probs = a->probs + at * a->C;
  for (int64_t c = 0; c < columns; c++) probs[c0 + c] = p[c] / (float)G;
  for (int64_t c = n; split == 0 && c < a->C; c++) probs[c] = 0;
}

static void kv_decode_finish_body(void *ctx, int64_t begin, int64_t end) {
  const kv_decode_job *job = ctx;
  const int64_t splits = job->logit ? job->splits : 1, Hkv = job->a->Hkv;
  for (int64_t i = begin; i < end; i++) kv_decode_finish(job, i / splits / Hkv, i / splits % Hkv, i % splits);
}

kv_status KV_OP(decode)(const kv_decode *a) {
  const int64_t heads = a->B * a->Hkv, G = heads ? a->H / a->Hkv : 0;
  if (heads == 0) return KV_OK;
  int64_t most = 0;
  for (int64_t i = 0; i < heads; i++) most = kv_max(most, kv_round_up(kv_decode_slots(a, i) + 1, VL));
  kv_decode_job job = {a, kv_stream_of(a->dtype, a->D, G, &a->slots), (most + SPLIT - 1) / SPLIT, most, NULL, NULL, 0};
  const int64_t floats = heads * job.splits * G * (job.shape.width + 2), task = kv_min(SPLIT, most) * a->D;
  job.states = malloc((size_t)floats * sizeof *job.states);
  if (a->probs) job.logit = malloc((size_t)(heads * G * most) * sizeof *job.logit);
  job.failed = !job.states || (a->probs && !job.logit);
  if (!job.failed) kv_parallel_for(heads * job.splits, kv_stream_grain(&job.shape, most), kv_decode_body, &job);
  if (!job.failed)
    kv_parallel_for(heads * (a->probs ? job.splits : 1), kv_max(1, 524288 / task), kv_decode_finish_body, &job);
  free(job.states);
  free(job.logit);
  return job.failed ? KV_NO_MEMORY : KV_OK;
}
