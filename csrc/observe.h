/* Rows that observe the alive slots, shared by score, peak and error: what every kernel over a[r,i] = exp(logit - lse)
 * does alike.
 *
 * kv_observe_start finds lse where it is not given: a task is some rows of one (b, kv head), their online softmax
 * without values. Then a kernel packs a block of keys and asks for tiles of logits, in ascending order of rows, so sums
 * over rows are the same for any number of threads. A tile's rows are to be summed before they are added to a total:
 * the error of a sum over thousands of rows stays that of a sum over a hundred.
 */
#ifndef KVEVICT_OBSERVE_H
#define KVEVICT_OBSERVE_H
#include <stdatomic.h>

#include "tile.h"

typedef struct {
  const void *op; /* the kernel's own struct */
  const kv_observers *a;
  const float *lse; /* [B, H, R], given or computed */
  int64_t lse_stride[2];
  float *computed; /* to be freed */
  int64_t steps;   /* of a task over rows */
  atomic_int failed;
} kv_observe;

/* One (b, kv head): its rows and columns. */
typedef struct {
  int64_t b, h;
  kv_queries query;
  kv_columns k;
  kv_sight sight;
} kv_observed;

static inline kv_observed kv_observed_of(const kv_observers *a, int64_t head) {
  kv_observed x = {.b = head / a->Hkv, .h = head % a->Hkv};
  x.query = kv_queries_of(a->dtype, a->D, a->H / a->Hkv, a->q, a->q_stride, x.b, x.h, a->scale, a->softcap);
  x.k = kv_columns_of(a->dtype, a->D, a->slots.k, a->slots.offset[head], a->slots.len[head], a->fresh.k,
                      a->fresh.k_stride, x.b, x.h, a->fresh.first[x.b], a->stop[x.b]);
  x.sight = (kv_sight){x.k.n - a->R, a->causal ? 0 : x.k.n, x.k.n};
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
    kv_rows_run(&x, &head.query, head.sight, t0, rows, &head.k, NULL, 0);
    for (int64_t r = 0; r < rows; r++)
      job->computed[(head.b * a->H + head.h * G + r % G) * a->R + t0 + r / G] = KV_LN2 * (x.m[r] + log2f(x.l[r]));
  }
  free(memory);
}

/* Returns whether to go on; call kv_observe_end in either case. */
static inline int kv_observe_start(kv_observe *job, const kv_observers *a, const void *op) {
  const int64_t heads = a->B * a->Hkv;
  *job = (kv_observe){op, a, a->lse, {a->lse_stride[0], a->lse_stride[1]}, NULL, 0, 0};
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

/* A tile of rows against a block of keys. Rows are head-major: row g * n + i is head g of the group at step t0 + i. */
typedef struct {
  int64_t steps;        /* of a tile, at most */
  float *k, *row;       /* a packed block of keys, [VL, D] */
  float *q, *s;         /* [rows, D] scaled, [rows, KEYS] logits in log2 units, -inf where the row does not see */
  float *lse, *w;       /* [rows] in log2 units and of no effect where the row sees nothing, [rows] weights */
  float *total;         /* [G, KEYS] reduced so far */
  float *v, *o, *e;     /* for kv_error: a packed block of values, [rows, D], [rows, KEYS] distances; */
  float *v_sum, *o_sum; /* and [KEYS], [rows] 1-norms */
} kv_tile;

static inline void *kv_tile_alloc(kv_tile *x, int64_t G, int64_t D, int pairs) {
  x->steps = kv_max(TILE / G, 1);
  const int64_t rows = kv_round_up(G * x->steps, MR), block = kv_block(D) * D, all = pairs ? 1 : 0;
  const int64_t sizes[] = {block,    VL * D,      rows * D,       rows * KEYS,       rows, rows,
                           G * KEYS, block * all, rows * D * all, rows * KEYS * all, KEYS, rows};
  float **const fields[] = {&x->k,     &x->row, &x->q, &x->s, &x->lse,   &x->w,
                            &x->total, &x->v,   &x->o, &x->e, &x->v_sum, &x->o_sum};
  return kv_carve(12, sizes, fields);
}

/* Steps t0 .. t0 + n - 1 against the packed block of `columns` from c0 on. An lse of NaN and a weight that is not
 * finite make NaN of the logits, so that they reach only what the row sees. Returns how many columns the last step
 * sees: what lies beyond is not written. */
static inline int64_t kv_tile_observe(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t0, int64_t n,
                                      int64_t c0, int64_t columns) {
  const kv_observers *a = job->a;
  const int64_t G = head->query.G, D = a->D, rows = G * n, padded = kv_round_up(rows, MR);
  const int64_t most = kv_min(kv_seen(head->sight, t0 + n - 1) - c0, columns);
  if (most <= 0) return 0;
  for (int64_t r = 0; r < rows; r++) kv_load_query(&head->query, r / n, t0 + r % n, x->q + r * D);
  memset(x->q + rows * D, 0, (size_t)((padded - rows) * D) * sizeof *x->q);
  kv_tile_s(x->q, padded, D, x->k, most, x->s);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t t = t0 + r % n, g = head->h * G + r / n;
    const float lse = job->lse[head->b * job->lse_stride[0] + g * job->lse_stride[1] + t];
    const float w = a->weight ? a->weight[head->b * a->weight_stride[0] + g * a->weight_stride[1] + t] : 1;
    const int64_t seen = lse == -INFINITY ? 0 : kv_min(kv_max(kv_seen(head->sight, t) - c0, 0), most);
    const int bad = isnan(lse) || !isfinite(w);
    float *s = x->s + r * KEYS;
    kv_cap_and_mask(s, head->query.cap, seen, kv_round_up(most, VL));
    for (int64_t c = 0; c < seen && bad; c++) s[c] = NAN;
    x->lse[r] = lse == -INFINITY || bad ? 0 : lse * KV_LOG2E;
    x->w[r] = bad ? 1 : w;
  }
  return most;
}

/* Columns from n on are 0. group KV_NONE: of each of the G heads. */
static inline void kv_group_zeros(float *out, int64_t G, kv_reduce group, int64_t n, int64_t C) {
  for (int64_t g = 0; g < (group == KV_NONE ? G : 1); g++)
    for (int64_t c = n; c < C; c++) out[g * C + c] = 0;
}

/* total [G, KEYS] / rows, over the heads of the group, -> n columns of out from c0 on. */
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

/* Where the results of a (b, kv head) start in out [B, Hkv, C], or [B, H, C]. */
static inline float *kv_group_at(float *out, const kv_observers *a, const kv_observed *head, kv_reduce group,
                                 int64_t C) {
  const int64_t at = head->b * a->Hkv + head->h;
  return out + (group == KV_NONE ? at * (a->H / a->Hkv) : at) * C;
}
#endif
