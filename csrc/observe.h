/* Observing rows and their attention weights a[r,i] = exp(logit - lse) over the alive slots, shared by score, peak,
 * error and kl.
 *
 * kv_observe_start computes lse where it is not given, by the online softmax without values; a task of this pass is
 * some rows of one (b, kv head). The op's own pass then packs a block of keys and computes tiles of logits in ascending
 * order of rows, so sums over rows are the same for any number of threads. The terms of a tile's rows are summed before
 * they are added to a total: the rounding error of a sum over thousands of rows is then about that of a sum over a
 * hundred. */
#ifndef KVEVICT_OBSERVE_H
#define KVEVICT_OBSERVE_H
#include <stdatomic.h>

#include "rows.h"

struct kv_reduction;

typedef struct {
  const void *op;                 /* the op's struct: kv_score, ... */
  const struct kv_reduction *how; /* how rows are reduced; NULL in peak and kl_grad, which do not reduce them */
  const kv_observers *a;
  const float *lse; /* [B, H, R], given or computed */
  int64_t lse_stride[2];
  float *computed; /* the lse to be freed, if it was computed; else NULL */
  int64_t steps;   /* number of steps whose rows one task computes */
  atomic_int failed;
} kv_observe;

/* One (b, kv head) with its observing rows and its n columns (alive slots). */
typedef struct {
  int64_t b, h, n;
  kv_queries query;
  kv_columns k;
  kv_bounds bounds;
} kv_observed;

static inline kv_observed kv_observed_of(const kv_observers *a, int64_t head) {
  kv_observed x = {.b = head / a->Hkv, .h = head % a->Hkv};
  x.query = kv_queries_of(a->dtype, a->D, a->H / a->Hkv, a->q, a->q_stride, x.b, x.h, a->scale, a->softcap);
  x.k = kv_head_columns(KV_KEYS, a->dtype, a->D, &a->slots, &a->chunk, x.b, x.h, a->Hkv, a->stop[x.b]);
  x.n = x.k.n;
  x.bounds = (kv_bounds){x.n - a->R, a->causal ? 0 : x.n, x.n};
  return x;
}

static inline void kv_observe_lse(void *ctx, int64_t begin, int64_t end) {
  kv_observe *job = ctx;
  const kv_observers *a = job->a;
  const int64_t G = a->H / a->Hkv, tasks = (a->R + job->steps - 1) / job->steps;
  kv_rows x;
  void *memory = kv_rows_alloc(&x, kv_min(job->steps, a->R) * G, a->D, 0);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) {
    const kv_observed head = kv_observed_of(a, i / tasks);
    const int64_t t0 = i % tasks * job->steps, rows = (kv_min(a->R, t0 + job->steps) - t0) * G;
    kv_rows_start(&x, &head.query, t0, rows, a->sinks ? a->sinks + head.h * G : NULL, 0);
    kv_rows_run(&x, &head.query, head.bounds, t0, rows, &head.k, NULL, 0, 0, head.bounds.n);
    for (int64_t r = 0; r < rows; r++)
      job->computed[(head.b * a->H + head.h * G + r % G) * a->R + t0 + r / G] =
          KV_LN2 * kv_state_lse(kv_state_from(x.state, 0, r));
  }
  free(memory);
}

/* Starts an op on observing rows. Returns whether that succeeded; the caller must call kv_observe_end in either
 * case. */
static inline int kv_observe_start(kv_observe *job, const kv_observers *a, const void *op) {
  const int64_t heads = a->B * a->Hkv;
  *job = (kv_observe){op, NULL, a, a->lse, {a->lse_stride[0], a->lse_stride[1]}, NULL, 0, 0};
  if (heads == 0 || a->R == 0) return 1;
  job->steps = kv_task_steps(heads, a->R, a->H / a->Hkv, a->D);
  if (a->lse) return 1;
  job->lse = job->computed = malloc((size_t)(a->B * a->H * a->R) * sizeof *job->computed);
  job->lse_stride[0] = a->H * a->R, job->lse_stride[1] = a->R;
  job->failed = !job->computed;
  if (!job->failed) kv_parallel_for(heads * ((a->R + job->steps - 1) / job->steps), 1, kv_observe_lse, job);
  return !job->failed;
}

static inline kv_status kv_observe_end(kv_observe *job) {
  free(job->computed);
  return job->failed ? KV_NO_MEMORY : KV_OK;
}

/* Scratch for a tile of rows against a block of keys. Rows are head-major: row g * n + i of a tile of n steps is head g
 * of the group at step t0 + i. */
typedef struct {
  int64_t steps;            /* the most steps of a tile */
  float *k, *row;           /* a packed block of keys; [VL, D] scratch of packing */
  float *q;                 /* [rows, D] scaled queries */
  float *s;                 /* logits in log2 units, -inf where a row does not see: KEYS for every row */
  int64_t by_head, by_step; /* the logits of head g at step t0 + i begin at s + g * by_head + i * by_step */
  int64_t c0;               /* the block's first column */
  float *lse, *w;           /* [rows] in log2 units, finite even where a row sees nothing; [rows] weights */
  float *total;             /* [G, KEYS] the op's terms, reduced over the rows so far */
  float *v, *o, *e;         /* for kv_error: a packed block of values; [rows, D] outputs; [rows, KEYS] distances */
  float *v_sum, *o_sum;     /* for kv_error: 1-norms of values [KEYS] and of outputs [rows] */
} kv_tile;

static inline void *kv_tile_alloc(kv_tile *x, int64_t G, int64_t D, int distances) {
  x->steps = kv_max(TILE / G, 1);
  const int64_t rows = kv_round_up(G * x->steps, PAD), block = kv_block(D) * D, all = distances ? 1 : 0;
  const int64_t sizes[] = {block,    VL * D,      rows * D,       rows * KEYS,       rows, rows,
                           G * KEYS, block * all, rows * D * all, rows * KEYS * all, KEYS, rows};
  float **const fields[] = {&x->k,     &x->row, &x->q, &x->s, &x->lse,   &x->w,
                            &x->total, &x->v,   &x->o, &x->e, &x->v_sum, &x->o_sum};
  return kv_carve(12, sizes, fields);
}

/* Loads the lse and the weights of steps t0 .. t0 + n - 1, whose logits of the block's first `most` columns are in
 * x->s. Caps the logits and sets those to -inf that a row does not see. An lse of NaN or a weight that is not finite
 * makes the row's logits NaN, so that only slots that the row sees become NaN. */
static inline void kv_tile_rows(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t0, int64_t n,
                                int64_t most, float cap) {
  const kv_observers *a = job->a;
  for (int64_t r = 0; r < head->query.G * n; r++) {
    const int64_t t = t0 + r % n, g = head->h * head->query.G + r / n;
    const float lse = job->lse[head->b * job->lse_stride[0] + g * job->lse_stride[1] + t];
    const float w = a->weight ? a->weight[head->b * a->weight_stride[0] + g * a->weight_stride[1] + t] : 1;
    const int64_t seen = lse == -INFINITY ? 0 : kv_min(kv_max(kv_seen(head->bounds, t) - x->c0, 0), most);
    const int bad = isnan(lse) || !isfinite(w);
    float *s = x->s + r / n * x->by_head + r % n * x->by_step;
    kv_cap_and_mask(s, cap, seen, kv_round_up(most, VL));
    for (int64_t c = 0; c < seen && bad; c++) s[c] = NAN;
    x->lse[r] = lse == -INFINITY || bad ? 0 : lse * KV_LOG2E;
    x->w[r] = bad ? 1 : w;
  }
}

/* Computes the logits of steps t0 .. t0 + n - 1 against the packed block of `columns` columns from c0 on, and loads
 * the rows (kv_tile_rows). Returns how many of the columns the last step sees; the columns after these are not
 * written. */
static inline int64_t kv_tile_observe(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t0, int64_t n,
                                      int64_t c0, int64_t columns) {
  const int64_t G = head->query.G, rows = G * n, padded = kv_round_up(rows, PAD);
  const int64_t most = kv_min(kv_seen(head->bounds, t0 + n - 1) - c0, columns);
  if (most <= 0) return 0;
  const int64_t words = head->query.words;
  for (int64_t r = 0; r < rows; r++) kv_load_words(&head->query, r / n, t0 + r % n, x->q + r * words);
  memset(x->q + rows * words, 0, (size_t)((padded - rows) * words) * sizeof *x->q);
  const kv_amx before = kv_tiles_begin(head->query.amx);
  kv_tile_s(&head->query, x->q, rows, x->k, most, x->s);
  kv_tiles_end(head->query.amx, before);
  x->by_head = n * KEYS, x->by_step = KEYS, x->c0 = c0;
  kv_tile_rows(job, head, x, t0, n, most, head->query.cap);
  return most;
}

/* How score, error and kl reduce a block of columns of one head over the observing rows. `block`, unless NULL, is
 * called once per block, when the block's keys are packed. `tile` is called for every tile of observing rows, n steps
 * from step t on, when x->s has these rows' logits of the block's first `most` columns; it adds the rows' terms to
 * x->total. The result is total, divided by the number of rows if `mean`, then reduced over the heads of the group. */
typedef struct kv_reduction {
  int64_t C;
  kv_reduce group;
  int mean;      /* whether total is divided by the number of rows */
  int largest;   /* whether totals are maxima, not sums */
  int distances; /* whether tiles have room for v, o and e */
  float *out;    /* [B, Hkv, C]; [B, H, C] if group is KV_NONE */
  void (*block)(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t c0, int64_t columns);
  void (*tile)(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t, int64_t n, int64_t most);
} kv_reduction;

/* Writes n columns of out, from column c0 on: total [G, KEYS] divided by `rows` and reduced over the heads of the
 * group. */
static inline void kv_group_out(const float *total, int64_t G, kv_reduce group, int64_t rows, float *out, int64_t C,
                                int64_t c0, int64_t n) {
  for (int64_t g = 0; g < G && group == KV_NONE; g++)
    for (int64_t c = 0; c < n; c++) out[g * C + c0 + c] = total[g * KEYS + c] / (float)rows;
  for (int64_t c = 0; c < n && group != KV_NONE; c++) {
    float all = total[c];
    for (int64_t g = 1; g < G; g++) {
      const float x = total[g * KEYS + c];
      all = group != KV_MAX ? all + x : isnan(x) || x > all ? x : all;
    }
    out[c0 + c] = all / (float)(group == KV_MEAN ? G * rows : rows);
  }
}

/* Writes the n columns of results, from column c0 on, of head `at`, whose totals [G, KEYS] are complete; with the first
 * block the zeros after the head's last column, too. */
static inline void kv_reduce_out(const kv_observe *job, const kv_observed *head, const float *total, int64_t at,
                                 int64_t c0, int64_t n) {
  const kv_reduction *how = job->how;
  const int64_t G = head->query.G, C = how->C, rows = job->a->R - job->a->row_first[head->b];
  float *const out = how->out + (how->group == KV_NONE ? at * G : at) * C;
  for (int64_t g = 0; g < (how->group == KV_NONE ? G : 1) && c0 == 0; g++)
    for (int64_t c = head->n; c < C; c++) out[g * C + c] = 0;
  if (n > 0) kv_group_out(total, G, how->group, how->mean ? kv_max(rows, 1) : 1, out, C, c0, n);
}

static inline void kv_reduce_block(const kv_observe *job, kv_tile *x, int64_t at, int64_t c0) {
  const kv_reduction *how = job->how;
  const kv_observed head = kv_observed_of(job->a, at);
  const int64_t G = head.query.G, R = job->a->R, from = job->a->row_first[head.b];
  const int64_t columns = kv_min(kv_block(job->a->D), head.n - c0);
  if (columns <= 0) {
    kv_reduce_out(job, &head, NULL, at, c0, 0);
    return;
  }
  kv_pack_k(&head.k, head.query.pairs, c0, columns, x->k, x->row);
  if (how->block) how->block(job, &head, x, c0, columns);
  memset(x->total, 0, (size_t)(G * KEYS) * sizeof *x->total);
  for (int64_t t = from; t < R; t += x->steps) {
    const int64_t n = kv_min(x->steps, R - t), most = kv_tile_observe(job, &head, x, t, n, c0, columns);
    if (most > 0) how->tile(job, &head, x, t, n, most);
  }
  kv_reduce_out(job, &head, x->total, at, c0, columns);
}

static inline void kv_reduce_body(void *ctx, int64_t begin, int64_t end) {
  kv_observe *job = ctx;
  const int64_t heads = job->a->B * job->a->Hkv;
  kv_tile x;
  void *memory = kv_tile_alloc(&x, job->a->H / job->a->Hkv, job->a->D, job->how->distances);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) kv_reduce_block(job, &x, i % heads, i / heads * kv_block(job->a->D));
  free(memory);
}

/* Runs an op that reduces observing rows as `how` says. A task computes one block of columns of one (b, kv head) over
 * all rows. */
static inline kv_status kv_reduce_rows(const kv_observers *a, const void *op, const kv_reduction *how) {
  const int64_t block = kv_block(a->D), blocks = kv_max((how->C + block - 1) / block, 1);
  kv_observe job;
  const int ready = kv_observe_start(&job, a, op);
  job.how = how;
  if (ready) kv_parallel_for(a->B * a->Hkv * blocks, 1, kv_reduce_body, &job);
  return kv_observe_end(&job);
}
#endif
