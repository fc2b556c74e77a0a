/* One decode step on a CPU. It is limited by memory bandwidth, so each stored row is read once, in place, for all G
 * query heads of its group, and a prefix once for all batch rows that share it, or most of it. The slots of a head are
 * cut into splits that do not depend on the number of threads. Pass 1 writes the new row and computes each split's softmax state; pass 2
 * merges the states in order and, if probs are wanted, turns the stored logits into attention weights. */
#include <stdatomic.h>

#include "stream.h"

enum { MANY = 64 /* the most query rows of a task: their queries and sums fit the second-level cache */ };

/* A batch row's place in the order in which a kv head's rows are computed. */
typedef struct {
  int32_t b;    /* the batch row */
  int32_t rows; /* this row and the next ones, which read slots of one prefix together; 0: an earlier row reads them */
  int64_t shared; /* how many slots they read together, in whole blocks */
} kv_decode_place;

typedef struct {
  const kv_decode *a;
  kv_stream shape;        /* describes a task's rows; every worker allocates its own scratch for it */
  int64_t G;              /* query heads of a group */
  int64_t splits, most;   /* of the longest head: number of splits; number of slots, rounded up to a multiple of VL */
  kv_decode_place *place; /* [Hkv, B] */
  float *states;          /* [Hkv, splits, B, G] softmax states (kv_state_in), in the order of place */
  float *logit;           /* [Hkv, B, G, most] logits in log2 units, in this order; NULL if probs are not wanted */
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

/* Returns whether the slots of head h in the prefix begin with the same ones for batch rows x and y, and differ by at
 * most a split, as those of prompts that go on differently after a text. */
static int kv_decode_alike(const kv_decode *a, int64_t h, int64_t x, int64_t y) {
  const kv_slots *prefix = &a->prefix;
  const float *centre = a->slots.centre;
  x = x * a->Hkv + h, y = y * a->Hkv + h;
  const int64_t more = (int64_t)prefix->len[x] - prefix->len[y];
  return prefix->offset[x] == prefix->offset[y] && more <= SPLIT && -more <= SPLIT &&
         (!centre || !memcmp(centre + x * a->D, centre + y * a->D, (size_t)a->D * sizeof *centre));
}

/* Fills the places of head h: `most` rows that share slots of a prefix, at most, follow each other. */
static void kv_decode_order(const kv_decode *a, int64_t h, int64_t most, kv_decode_place *place) {
  for (int64_t b = 0; b < a->B; b++)
    place[b] = (kv_decode_place){(int32_t)b, 1, kv_decode_shared(a, b * a->Hkv + h) / BLOCK * BLOCK};
  for (int64_t p = 0; p < a->B && a->prefix.len; p += place[p].rows) {
    for (int64_t i = p + 1; i < a->B && place[p].rows < most; i++)
      if (kv_decode_alike(a, h, place[p].b, place[i].b)) {
        const int64_t to = p + place[p].rows++;
        kv_decode_place moved = place[i];
        memmove(place + to + 1, place + to, (size_t)(i - to) * sizeof *place);
        moved.rows = 0;
        place[to] = moved;
        place[p].shared = kv_min(place[p].shared, moved.shared);
      }
    for (int64_t i = 1; i < place[p].rows; i++) place[p + i].shared = place[p].shared;
  }
}

/* Computes one split of head h for the batch row at place p. Whole blocks of a prefix are computed for all rows that
 * read it together, then each row's further slots. */
static void kv_decode_task(const kv_decode_job *job, const kv_stream *x, int64_t p, int64_t h, int64_t split) {
  const kv_decode *a = job->a;
  const kv_decode_place *place = job->place + h * a->B + p;
  const int64_t G = job->G, D = a->D, c0 = split * SPLIT, first = place->b * a->Hkv + h;
  const int64_t shared = kv_max(c0, kv_min(c0 + SPLIT, place->shared));
  const int64_t rows = shared > c0 ? place->rows : kv_decode_slots(a, first) >= c0;
  const kv_state all = kv_state_in(job->states, h * job->splits + split, a->B * G, x->width);
  const kv_state state = kv_state_from(all, x->width, p * G);
  float *logit = job->logit ? job->logit + (h * a->B + p) * G * job->most : NULL;
  kv_columns k = kv_decode_columns(a, first, 0), v = kv_decode_columns(a, first, 1);
  float cap = 0;
  kv_state_start(state, rows * G, x->width);
  for (int64_t i = 0; i < rows; i++) {
    const kv_queries query = kv_queries_of(a->dtype, D, G, a->q, a->q_stride, place[i].b, h, a->scale, a->softcap);
    kv_stream_load(x, &query, i * G, G, &k);
    cap = query.cap;
  }
  kv_stream_run(x, cap, &k, &v, c0, shared, 0, rows * G, state, logit, job->most);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t b = place[i].b, at = b * a->Hkv + h, n = kv_decode_slots(a, at) + 1, stop = kv_min(n, c0 + SPLIT);
    k = kv_decode_columns(a, at, 0), v = kv_decode_columns(a, at, 1);
    if (stop == n) kv_decode_append(a, b, h, a->slots.offset[at] + a->slots.len[at]);
    kv_stream_run(x, cap, &k, &v, shared, stop, i * G, (i + 1) * G, state, logit, job->most);
  }
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
static void kv_decode_finish(const kv_decode_job *job, int64_t place, int64_t h, int64_t split) {
  const kv_decode *a = job->a;
  const int64_t G = job->G, width = job->shape.width, rows = a->B * G, b = job->place[h * a->B + place].b;
  const int64_t at = b * a->Hkv + h, n = kv_decode_slots(a, at) + 1;
  const int64_t c0 = split * SPLIT, columns = kv_min(n - c0, SPLIT), size = kv_size(a->dtype);
  float m, d, p[SPLIT] = {0}, o[KV_MOST_D];
  const kv_state first = kv_state_in(job->states, h * job->splits, rows, width),
                 state = {split == 0 ? o : NULL, &m, &d};
  if (columns <= 0) return;
  for (int64_t g = 0; g < G; g++) {
    const int64_t head = b * a->H + h * G + g, row = place * G + g;
    const float sink = a->sinks ? a->sinks[h * G + g] * KV_LOG2E : -INFINITY;
    kv_state_merge(kv_state_from(first, width, row), rows * (width + 2), (n + SPLIT - 1) / SPLIT, width, sink, state);
    const float lse = kv_state_lse(state), from = lse == -INFINITY ? 0 : lse;
    if (split == 0) {
      kv_state_normalize(state, width);
      kv_stream_order(&job->shape, 1, o);
      kv_store_row(a->dtype, o, (char *)a->out + head * a->D * size, a->D);
      a->lse[head] = KV_LN2 * lse;
    }
    const float *logit = a->probs ? job->logit + (h * rows + row) * job->most + c0 : NULL;
    for (int64_t c = 0; logit && c < columns; c += VL)
      vf_store(p + c, vf_load(p + c) + vf_exp2(vf_load(logit + c) - from));
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
  const int64_t splits = (most + SPLIT - 1) / SPLIT, task = kv_min(SPLIT, most) * a->D;
  /* Every thread gets two tasks, or more. */
  const int64_t together = kv_max(1, kv_min(kv_min(a->B, MANY / G), heads * splits / (2 * kv_threads())));
  kv_decode_job job = {a, kv_stream_of(a->dtype, a->D, together * G, &a->slots), G, splits, most, NULL, NULL, NULL, 0};
  job.place = malloc((size_t)heads * sizeof *job.place);
  job.states = malloc((size_t)(heads * splits * G * (job.shape.width + 2)) * sizeof *job.states);
  if (a->probs) job.logit = malloc((size_t)(heads * G * most) * sizeof *job.logit);
  job.failed = !job.place || !job.states || (a->probs && !job.logit);
  for (int64_t h = 0; !job.failed && h < a->Hkv; h++) kv_decode_order(a, h, together, job.place + h * a->B);
  if (!job.failed) kv_parallel_for(heads * splits, kv_stream_grain(&job.shape, most), kv_decode_body, &job);
  if (!job.failed)
    kv_parallel_for(heads * (a->probs ? splits : 1), kv_max(1, 524288 / task), kv_decode_finish_body, &job);
  free(job.place);
  free(job.states);
  free(job.logit);
  return job.failed ? KV_NO_MEMORY : KV_OK;
}
