/* Gradient of kl to queries and new keys, on a CPU. With t the target, divided by its sum, and p the mean attention of
 * `rows` observing rows, g[i] = (1 / sum p - t[i] / p[i]) / rows is the gradient of the loss to each attention weight
 * a[r,i], and w[r,i] is its gradient to the logit, through the softmax:
 *   c[r] = sum a[r,i] g[i]              w[r,i] = a[r,i] (g[i] - c[r])
 *   dq[r] = scale sum w[r,i] k[i]       dk[i] = scale sum w[r,i] q[r]
 * A task is one (b, kv head). It goes over the head's columns twice, first to compute c and then to compute w, so that
 * no matrix is stored. observe.h has the tiles. */
#include "kl.h"

typedef struct {
  kv_tile tile;
  float *delta;       /* [G, R] c of the formulas above */
  float *weight_grad; /* [G, KEYS] g of the formulas above, for a block's columns */
  float *keys;        /* [KEYS, width] a block's keys as floats */
  float *o, *q;       /* o [rows, width] sums of w k; q [D] a query */
  float *zeros;       /* [rows] zeros, one per row of a tile, which may have more than TILE rows */
} kv_kl_space;

static void *kv_kl_alloc(kv_kl_space *x, const kv_observers *a, void **tile) {
  const int64_t G = a->H / a->Hkv, width = kv_round_up(a->D, VL);
  *tile = kv_tile_alloc(&x->tile, G, a->D, 0);
  const int64_t rows = kv_round_up(G * x->tile.steps, MR);
  const int64_t sizes[] = {G * a->R, G * KEYS, kv_block(a->D) * width, rows * width, a->D, rows};
  float **const fields[] = {&x->delta, &x->weight_grad, &x->keys, &x->o, &x->q, &x->zeros};
  void *memory = kv_carve(6, sizes, fields);
  if (memory) memset(x->zeros, 0, (size_t)rows * sizeof *x->zeros);
  return memory;
}

/* Computes g, times the gradient to the loss, for the block of columns from c0 on; 0 for columns that are not compared
 * with the target. */
static void kv_kl_weight_grad(const kv_kl_grad *a, const kv_observed *head, const kv_kl_of *of, int64_t c0,
                              float *out) {
  const int64_t G = head->query.G, b = head->b, observing = kv_max(a->rows.R - a->rows.row_first[b], 1);
  for (int64_t g = 0; g < G; g++)
    for (int64_t i = 0; i < KEYS; i++) {
      const int64_t c = c0 + i;
      double grad = 0;
      if (c < of[g].n && !of[g].empty) {
        const double p = of[g].attention[c];
        grad = 1 / of[g].attention_sum - (p < KV_KL_LEAST ? 0 : of[g].target[c] / of[g].target_sum / p);
      }
      out[g * KEYS + i] = (float)(grad * a->grad[b * a->rows.H + head->h * G + g] / (double)observing);
    }
}

/* Turns a row's first `most` logits s into w, given g (weight_grad) and the row's c (delta). Returns the sum of a g
 * over these columns, the block's part of c. */
static float kv_kl_logit_grad(float *s, int64_t most, float lse, const float *weight_grad, float delta, float cap) {
  vf sum = vf_set1(0);
  for (int64_t c = 0; c < most; c += VL) {
    const vf x = vf_load(s + c), a = vf_exp2(x - lse), g = vf_load(weight_grad + c);
    const vf w = kv_cap_grad(a * (g - delta), x, cap);
    sum += a * g;
    vf_store(s + c, vf_select((vu)(a != 0), w, vf_set1(0)));
  }
  return vf_sum(sum);
}

/* Adds scale w q of the tile's rows, which are steps t .. t + n - 1, to dk of the block's new keys. */
static void kv_kl_add_dk(const kv_kl_grad *a, const kv_observed *head, kv_kl_space *x, int64_t t, int64_t n, int64_t c0,
                         int64_t most) {
  const int64_t D = a->rows.D, at = head->b * a->rows.Hkv + head->h, len = a->rows.slots.len[at];
  const int64_t first = a->rows.chunk.first[head->b];
  const kv_queries *query = &head->query;
  for (int64_t r = 0; r < query->G * n && c0 + most > len; r++) {
    kv_load_row(query->dtype, query->q + r / n * query->head_stride + (t + r % n) * query->step_stride, x->q, D);
    for (int64_t c = kv_max(len - c0, 0); c < most; c++) {
      const float w = a->rows.scale * x->tile.s[r * KEYS + c];
      float *to = a->dk + (at * a->rows.S + c0 + c - len + first) * D;
      for (int64_t d = 0; d < D && w != 0; d++) to[d] += w * x->q[d];
    }
  }
}

/* Adds scale w k of the block's keys to dq of the tile's rows. finite: whether all keys of the block are finite. */
static void kv_kl_add_dq(const kv_kl_grad *a, const kv_observed *head, kv_kl_space *x, int64_t t, int64_t n, int64_t c0,
                         int64_t most, int finite) {
  const int64_t D = a->rows.D, R = a->rows.R, G = head->query.G, width = kv_round_up(D, VL), rows = G * n;
  memset(x->o, 0, (size_t)(kv_round_up(rows, MR) * width) * sizeof *x->o);
  memset(x->tile.s + rows * KEYS, 0, (size_t)((kv_round_up(rows, MR) - rows) * KEYS) * sizeof *x->tile.s);
  if (finite) kv_tile_o(0, 0, x->tile.s, kv_round_up(rows, MR), most, x->keys, width, width, x->zeros, x->o);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t seen = kv_min(kv_seen(head->bounds, t + r % n) - c0, most);
    float *to = a->dq + ((head->b * a->rows.H + head->h * G + r / n) * R + t + r % n) * D;
    if (!finite && seen > 0) kv_row_o(0, 0, x->tile.s + r * KEYS, seen, x->keys, width, 0, x->o + r * width);
    for (int64_t d = 0; d < D; d++) to[d] += a->rows.scale * x->o[r * width + d];
  }
}

/* Goes once over the columns of a head and computes every row's c or, if `grads`, the gradients dq and dk. */
static void kv_kl_pass(const kv_observe *job, const kv_observed *head, const kv_kl_of *of, kv_kl_space *x, int grads) {
  const kv_kl_grad *a = job->op;
  const int64_t R = a->rows.R, D = a->rows.D, block = kv_block(D);
  for (int64_t c0 = 0; c0 < head->n; c0 += block) {
    const int64_t columns = kv_min(block, head->n - c0);
    kv_pack_k(&head->k, head->query.pairs, c0, columns, x->tile.k, x->tile.row);
    const int finite = grads && kv_pack_v(&head->k, 0, c0, columns, x->keys, kv_round_up(D, VL));
    kv_kl_weight_grad(a, head, of, c0, x->weight_grad);
    for (int64_t t = a->rows.row_first[head->b]; t < R; t += x->tile.steps) {
      const int64_t n = kv_min(x->tile.steps, R - t);
      const int64_t most = kv_tile_observe(job, head, &x->tile, t, n, c0, columns);
      for (int64_t r = 0; r < head->query.G * n && most > 0; r++) {
        float *c = x->delta + r / n * R + t + r % n;
        const float sum = kv_kl_logit_grad(x->tile.s + r * KEYS, most, x->tile.lse[r], x->weight_grad + r / n * KEYS,
                                           grads ? *c : 0, head->query.cap);
        if (!grads) *c += sum;
      }
      if (!grads || most <= 0) continue;
      kv_kl_add_dq(a, head, x, t, n, c0, most, finite);
      kv_kl_add_dk(a, head, x, t, n, c0, most);
    }
  }
}

static void kv_kl_grad_body(void *ctx, int64_t begin, int64_t end) {
  kv_observe *job = ctx;
  const kv_kl_grad *a = job->op;
  const int64_t G = a->rows.H / a->rows.Hkv, R = a->rows.R, D = a->rows.D;
  kv_kl_space x;
  void *tile, *memory = kv_kl_alloc(&x, &a->rows, &tile);
  kv_kl_of *of = malloc((size_t)G * sizeof *of);
  if (!tile || !memory || !of) job->failed = 1;
  for (int64_t i = begin; tile && memory && of && i < end; i++) {
    const kv_observed head = kv_observed_of(&a->rows, i);
    for (int64_t g = 0; g < G; g++) of[g] = kv_kl_head(a->target, a->N, a->mean_attn, a->C, i * G + g, head.n);
    if (R) memset(a->dq + i * G * R * D, 0, (size_t)(G * R * D) * sizeof *a->dq);
    if (a->rows.S) memset(a->dk + i * a->rows.S * D, 0, (size_t)(a->rows.S * D) * sizeof *a->dk);
    memset(x.delta, 0, (size_t)(G * R) * sizeof *x.delta);
    kv_kl_pass(job, &head, of, &x, 0);
    kv_kl_pass(job, &head, of, &x, 1);
  }
  free(of), free(memory), free(tile);
}

kv_status KV_OP(kl_grad)(const kv_kl_grad *a) {
  kv_observe job;
  if (kv_observe_start(&job, &a->rows, a)) kv_parallel_for(a->rows.B * a->rows.Hkv, 1, kv_kl_grad_body, &job);
  return kv_observe_end(&job);
}
