/* Importance of every alive slot from observing rows on a CPU: a[r,i] = exp(logit[r,i] - lse[r]) reduced over rows.
 *
 * Pass 1, only where lse is not given: a task is some rows of one (b, kv head), their online softmax without values.
 * Pass 2: a task is one block of keys of one (b, kv head) and owns these columns; it goes over all rows in ascending
 * order, so the sums are the same for any number of threads. A tile's rows are summed before they are added to the
 * total: the error of a sum over thousands of rows stays that of a sum over a hundred.
 */
#include <stdatomic.h>

#include "tile.h"

kv_status KV_OP(score)(const kv_score *a);

typedef struct {
  const kv_score *a;
  int64_t steps; /* of a task of pass 1 */
  float *lse;    /* [B, H, R] of pass 1, or NULL */
  atomic_int failed;
} kv_score_job;

/* One (b, kv head): its rows and columns. */
typedef struct {
  kv_queries query;
  kv_columns k;
  kv_sight sight;
} kv_score_head;

static kv_score_head kv_score_head_of(const kv_score *a, int64_t b, int64_t h) {
  const int64_t at = b * a->Hkv + h;
  kv_score_head x;
  x.query = kv_queries_of(a->dtype, a->D, a->H / a->Hkv, a->q, a->q_stride, b, h, a->scale, a->softcap);
  x.k = kv_columns_of(a->dtype, a->D, a->slots.k, a->slots.offset[at], a->slots.len[at], a->fresh.k, a->fresh.k_stride,
                      b, h, a->fresh.first[b], a->stop[b]);
  x.sight = (kv_sight){x.k.n - a->R, a->causal ? 0 : x.k.n, x.k.n};
  return x;
}

static void kv_score_lse_body(void *ctx, int64_t begin, int64_t end) {
  kv_score_job *job = ctx;
  const kv_score *a = job->a;
  const int64_t G = a->H / a->Hkv, tasks = (a->R + job->steps - 1) / job->steps;
  kv_rows x;
  void *memory = kv_rows_alloc(&x, kv_min(job->steps, a->R) * G, a->D, 0);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) {
    const int64_t at = i / tasks, b = at / a->Hkv, h = at % a->Hkv, t0 = i % tasks * job->steps;
    const int64_t rows = (kv_min(a->R, t0 + job->steps) - t0) * G;
    const kv_score_head head = kv_score_head_of(a, b, h);
    kv_rows_start(&x, &head.query, t0, rows, a->sinks ? a->sinks + h * G : NULL, 0);
    kv_rows_run(&x, &head.query, head.sight, t0, rows, &head.k, NULL, 0);
    for (int64_t r = 0; r < rows; r++)
      job->lse[(b * a->H + h * G + r % G) * a->R + t0 + r / G] = KV_LN2 * (x.m[r] + log2f(x.l[r]));
  }
  free(memory);
}

/* Scratch of a task of pass 2. A tile's rows are head-major: row g * steps + i is head g at step t0 + i. */
typedef struct {
  int64_t steps;      /* of a tile */
  float *k, *row;     /* a packed block of keys, [VL, D] */
  float *q, *s, *lse; /* [G * steps, D] scaled, [G * steps, KEYS], [G * steps] in log2 units */
  float *total;       /* [G, KEYS] reduced so far */
} kv_columns_scratch;

static void *kv_columns_alloc(kv_columns_scratch *x, int64_t G, int64_t D) {
  x->steps = kv_max(TILE / G, 1);
  const int64_t rows = kv_round_up(G * x->steps, 16 * MR);
  const int64_t floats = kv_block(D) * D + VL * D + rows * (D + KEYS + 1) + G * KEYS;
  x->k = aligned_alloc(64, (size_t)kv_round_up(floats, 16) * sizeof *x->k);
  x->s = x->k + kv_block(D) * D;
  x->total = x->s + rows * KEYS;
  x->q = x->total + G * KEYS;
  x->row = x->q + rows * D;
  x->lse = x->row + VL * D;
  return x->k;
}

/* Steps t0 .. t0 + n - 1 against the packed block of columns from c0 on: s = logits, -inf where a row does not see the
 * column or takes no part, and lse of each row. An lse of NaN goes into s, so that it reaches only what the row sees.
 * Returns how many columns the last step sees. */
static int64_t kv_score_tile(const kv_score_job *job, const kv_score_head *head, kv_columns_scratch *x, int64_t b,
                             int64_t h, int64_t t0, int64_t n, int64_t c0) {
  const kv_score *a = job->a;
  const int64_t G = head->query.G, D = a->D, rows = G * n, padded = kv_round_up(rows, MR);
  const int64_t most = kv_min(kv_seen(head->sight, t0 + n - 1) - c0, kv_block(D));
  if (most <= 0) return 0;
  for (int64_t r = 0; r < rows; r++) kv_load_query(&head->query, r / n, t0 + r % n, x->q + r * D);
  memset(x->q + rows * D, 0, (size_t)((padded - rows) * D) * sizeof *x->q);
  kv_tile_s(x->q, padded, D, x->k, most, x->s);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t t = t0 + r % n, g = h * G + r / n;
    const float lse =
        job->lse ? job->lse[(b * a->H + g) * a->R + t] : a->lse[b * a->lse_stride[0] + g * a->lse_stride[1] + t];
    const int64_t seen = lse == -INFINITY ? 0 : kv_min(kv_max(kv_seen(head->sight, t) - c0, 0), most);
    float *s = x->s + r * KEYS;
    kv_cap_and_mask(s, head->query.cap, seen, kv_round_up(most, VL));
    for (int64_t c = 0; c < seen && isnan(lse); c++) s[c] = lse;
    x->lse[r] = lse == -INFINITY || isnan(lse) ? 0 : lse * KV_LOG2E;
  }
  return most;
}

/* total [G, most] gains sum or maximum over the tile's n steps of 2^(s - lse). */
static void kv_score_reduce(const kv_columns_scratch *x, int64_t G, int64_t n, int64_t most, kv_reduce reduce) {
  for (int64_t g = 0; g < G; g++)
    for (int64_t c = 0; c < most; c += VL) {
      const float *s = x->s + g * n * KEYS + c, *lse = x->lse + g * n;
      float *total = x->total + g * KEYS + c;
      vf acc = vf_set1(0);
      if (reduce == KV_MAX) {
        for (int64_t i = 0; i < n; i++) acc = vf_max_nan(acc, vf_exp2(vf_load(s + i * KEYS) - lse[i]));
        vf_store(total, vf_max_nan(vf_load(total), acc));
      } else {
        for (int64_t i = 0; i < n; i++) acc += vf_exp2(vf_load(s + i * KEYS) - lse[i]);
        vf_store(total, vf_load(total) + acc);
      }
    }
}

static void kv_score_block(const kv_score_job *job, kv_columns_scratch *x, int64_t b, int64_t h, int64_t c0) {
  const kv_score *a = job->a;
  const kv_score_head head = kv_score_head_of(a, b, h);
  const int64_t G = a->H / a->Hkv, columns = kv_min(kv_block(a->D), head.k.n - c0);
  float *out = a->out + (b * a->Hkv + h) * a->C;
  if (c0 == 0)
    for (int64_t c = head.k.n; c < a->C; c++) out[c] = 0;
  if (columns <= 0) return;
  kv_pack_k(&head.k, c0, columns, x->k, x->row);
  memset(x->total, 0, (size_t)(G * KEYS) * sizeof *x->total);
  for (int64_t t = a->row_first[b]; t < a->R; t += x->steps) {
    const int64_t n = kv_min(x->steps, a->R - t), most = kv_score_tile(job, &head, x, b, h, t, n, c0);
    kv_score_reduce(x, G, n, most, a->reduce);
  }
  const int64_t rows = a->reduce == KV_MEAN ? kv_max(a->R - a->row_first[b], 1) : 1;
  for (int64_t c = 0; c < columns; c++) {
    float sum = 0;
    for (int64_t g = 0; g < G; g++) sum += x->total[g * KEYS + c];
    out[c0 + c] = sum / (float)(G * rows);
  }
}

static void kv_score_body(void *ctx, int64_t begin, int64_t end) {
  kv_score_job *job = ctx;
  const kv_score *a = job->a;
  const int64_t heads = a->B * a->Hkv;
  kv_columns_scratch x;
  void *memory = kv_columns_alloc(&x, a->H / a->Hkv, a->D);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++)
    kv_score_block(job, &x, i % heads / a->Hkv, i % heads % a->Hkv, i / heads * kv_block(a->D));
  free(memory);
}

kv_status KV_OP(score)(const kv_score *a) {
  const int64_t heads = a->B * a->Hkv, blocks = kv_max((a->C + kv_block(a->D) - 1) / kv_block(a->D), 1);
  if (heads == 0) return KV_OK;
  kv_score_job job = {a, kv_task_steps(heads, a->R, a->H / a->Hkv, a->D), NULL, 0};
  if (!a->lse && a->R > 0) {
    job.lse = malloc((size_t)(a->B * a->H * a->R) * sizeof *job.lse);
    if (!job.lse) return KV_NO_MEMORY;
    kv_parallel_for(heads * ((a->R + job.steps - 1) / job.steps), 1, kv_score_lse_body, &job);
  }
  if (!job.failed) kv_parallel_for(heads * blocks, 1, kv_score_body, &job);
  free(job.lse);
  return job.failed ? KV_NO_MEMORY : KV_OK;
}
