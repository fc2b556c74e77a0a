/* attend whose last R rows observe, on a CPU: out and lse as attend computes them, and what score, error or peak define
 * over the observing rows, with the same bits as these ops after attend.
 *
 * A task attends as attend.h does, with a range of the steps of one (b, kv head), and keeps the logits of its observing
 * rows. When their lse is known it goes over the logits again, in the tiles of rows that observe.h has: no product
 * Q K^T is made twice. Each tile of rows has totals of its own, and these are added in ascending order of rows after a
 * wave of ranges, so sums have the order of observe.h for any number of threads. Where scratch would be more than
 * SCRATCH, attend cuts columns, or tile registers multiply (amx.h) without a span, the two ops run one after the
 * other. */
#ifndef KVEVICT_FUSED_H
#define KVEVICT_FUSED_H
#include "attend.h"
#include "observe.h"

enum {
  SCRATCH = 64 << 20,    /* the most bytes of logits and totals of all threads */
  LOGITS = 8 << 20,      /* the most bytes of one thread's logits */
  LEAST_ROWS = 2 * TILE, /* the fewest rows of a task: packing keys for fewer costs more than a second product */
};

typedef struct {
  const kv_attend *a;
  kv_observe observe;        /* the observing rows, with lse given */
  int span;                  /* as in kv_attend_score; -1: none */
  float *own_lse;            /* [B, H, R] with a span: the lse of the observing rows over it; else NULL */
  int64_t tile;              /* number of steps of a tile of observing rows */
  int64_t steps, ranges;     /* number of steps of a range, a multiple of tile; number of ranges */
  int64_t blocks, keeps;     /* number of blocks of columns; most rows of a range whose logits are kept */
  int64_t wave, first, last; /* most ranges of a wave; the wave: ranges first .. last - 1 */
  int64_t tiles;             /* the most tiles of observing rows of a head in a wave */
  float *totals,
      *tile_totals; /* [heads, blocks, G, KEYS]; [heads, tiles, blocks, G, KEYS] of the wave; NULL for peak */
  atomic_int failed;
} kv_fused;

/* Returns the call's first observing step in batch row b. */
static int64_t kv_fused_from(const kv_fused *x, int64_t b) {
  return x->a->T - x->observe.a->R + x->observe.a->row_first[b];
}

/* Returns the first step of a range. Tiles of observing rows do not cross ranges. */
static int64_t kv_fused_start(const kv_fused *x, int64_t b, int64_t range) {
  return range ? kv_min(range * x->steps + kv_fused_from(x, b) % x->tile, x->a->T) : 0;
}

/* Returns the wave's first observing step in batch row b; kv_fused_start(x, b, x->last) ends the wave. */
static int64_t kv_fused_wave(const kv_fused *x, int64_t b) {
  return kv_max(kv_fused_from(x, b), kv_fused_start(x, b, x->first));
}

/* Computes the lse of one observing row over the head's first `span` stored columns and its new ones, as attend on
 * these columns computes it. `all` has the row's logits of block 0; those of each next block are `step` floats
 * further. */
static float kv_fused_lse(const kv_fused *x, const kv_attend_head *head, int64_t g, int64_t t, const float *all,
                          int64_t step) {
  const int64_t block = kv_block(x->a->D), len = head->bounds.least, lead = kv_min(len, x->span);
  const int64_t n = lead + kv_seen(head->bounds, t) - len;
  float s[KEYS], m = x->a->sinks ? x->a->sinks[head->h * head->query.G + g] * KV_LOG2E : -INFINITY;
  float d = m == -INFINITY ? 0 : 1;
  for (int64_t c0 = 0; c0 < n; c0 += block) {
    const int64_t columns = kv_min(block, n - c0);
    for (int64_t c = 0, run; c < columns; c += run) {
      const int64_t at = c0 + c < lead ? c0 + c : len + c0 + c - lead;
      run = kv_min(columns - c, block - at % block);
      if (c0 + c < lead) run = kv_min(run, lead - c0 - c);
      memcpy(s + c, all + at / block * step + at % block, (size_t)run * sizeof *s);
    }
    const int64_t padded = kv_round_up(columns, VL);
    for (int64_t c = columns; c < padded; c++) s[c] = -INFINITY;
    kv_softmax(0, s, s, padded, &m, &d);
  }
  return KV_LN2 * (m + log2f(d));
}

/* Reduces the observing rows of steps t0 .. t1 - 1 of head `at`. Their logits are kept from row `row` of the range
 * on. */
static void kv_fused_observe(const kv_fused *x, const kv_rows *rows, kv_tile *tile, const kv_attend_head *head,
                             int64_t at, int64_t t0, int64_t t1, int64_t row) {
  const kv_observe *observe = &x->observe;
  const kv_observed seen = kv_observed_of(observe->a, at);
  const int64_t G = seen.query.G, block = kv_block(x->a->D), before = x->a->T - observe->a->R;
  const float *const all = rows->all + (row - rows->kept) * KEYS;
  for (int64_t r = 0; r < (t1 - t0) * G && x->own_lse; r++)
    x->own_lse[(head->b * x->a->H + head->h * G + r % G) * observe->a->R + t0 - before + r / G] =
        kv_fused_lse(x, head, r % G, t0 + r / G, all + r * KEYS, rows->keeps * KEYS);
  for (int64_t c0 = 0; c0 < seen.n; c0 += block) {
    const int64_t columns = kv_min(block, seen.n - c0);
    if (observe->how->block) observe->how->block(observe, &seen, tile, c0, columns);
    for (int64_t t = t0; t < t1; t += x->tile) {
      const int64_t n = kv_min(x->tile, t1 - t), most = kv_min(kv_seen(seen.bounds, t - before + n - 1) - c0, columns);
      if (x->tile_totals) {
        const int64_t k = (t - kv_fused_wave(x, head->b)) / x->tile;
        tile->total = x->tile_totals + ((at * x->tiles + k) * x->blocks + c0 / block) * G * KEYS;
        memset(tile->total, 0, (size_t)(G * KEYS) * sizeof *tile->total);
      }
      if (most <= 0) continue;
      tile->s = rows->all + (c0 / block * rows->keeps + row - rows->kept + (t - t0) * G) * KEYS;
      tile->by_head = KEYS, tile->by_step = G * KEYS, tile->c0 = c0;
      kv_tile_rows(observe, &seen, tile, t - before, n, most, 0);
      observe->how->tile(observe, &seen, tile, t - before, n, most);
    }
  }
}

/* Runs tasks begin .. end - 1 of a wave: the last ranges first, since their rows see the most columns. */
static void kv_fused_body(void *ctx, int64_t begin, int64_t end) {
  kv_fused *x = ctx;
  const kv_attend *a = x->a;
  const int64_t heads = a->B * a->Hkv, G = a->H / a->Hkv, width = kv_round_up(a->D, VL);
  kv_rows rows;
  kv_tile tile;
  float *all = aligned_alloc(64, (size_t)(x->blocks * x->keeps * KEYS) * sizeof *all);
  void *memory = kv_rows_alloc(&rows, (x->steps + x->tile) * G, a->D, 1);
  void *other = kv_tile_alloc(&tile, G, a->D, x->observe.how->distances);
  if (!all || !memory || !other) x->failed = 1;
  for (int64_t i = begin; all && memory && other && i < end; i++) {
    const int64_t at = i % heads, range = x->last - 1 - i / heads;
    const kv_attend_head head = kv_attend_head_of(a, at);
    const int64_t t0 = kv_fused_start(x, head.b, range), t1 = kv_fused_start(x, head.b, range + 1);
    const int64_t from = kv_max(t0, kv_fused_from(x, head.b)), row = (from - t0) * G;
    rows.all = from < t1 ? all : NULL, rows.kept = row / TILE * TILE, rows.keeps = x->keeps;
    if (t0 == t1) continue;
    kv_rows_start(&rows, &head.query, t0, (t1 - t0) * G, a->sinks ? a->sinks + head.h * G : NULL, width);
    kv_rows_run(&rows, &head.query, head.bounds, t0, (t1 - t0) * G, &head.k, &head.v, width, 0, head.n);
    kv_attend_finish(a, &head, &rows, t0, (t1 - t0) * G, width);
    if (rows.all) kv_fused_observe(x, &rows, &tile, &head, at, from, t1, row);
  }
  free(all), free(memory), free(other);
}

/* Adds the totals of the wave's tiles of rows, in ascending order, and writes the results after the last wave. A task
 * computes one block of columns of one head. */
static void kv_fused_add_body(void *ctx, int64_t begin, int64_t end) {
  kv_fused *x = ctx;
  const int64_t G = x->a->H / x->a->Hkv, size = G * KEYS, block = kv_block(x->a->D);
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i / x->blocks, c0 = i % x->blocks * block;
    const kv_observed seen = kv_observed_of(x->observe.a, at);
    const int64_t steps = kv_fused_start(x, seen.b, x->last) - kv_fused_wave(x, seen.b);
    float *const total = x->totals + i * size;
    if (x->first == 0) memset(total, 0, (size_t)size * sizeof *total);
    for (int64_t k = 0; k * x->tile < steps && c0 < seen.n; k++) {
      const float *more = x->tile_totals + ((at * x->tiles + k) * x->blocks + i % x->blocks) * size;
      for (int64_t c = 0; c < size; c += VL) {
        const vf old = vf_load(total + c), add = vf_load(more + c);
        vf_store(total + c, x->observe.how->largest ? vf_max_nan(old, add) : old + add);
      }
    }
    if (x->last == x->ranges) kv_reduce_out(&x->observe, &seen, total, at, c0, kv_min(block, seen.n - c0));
  }
}

/* Decides how the steps are cut into ranges and these into waves. Returns whether keeping logits is worth it: scratch
 * suffices, attend has all logits of the observing rows, and tile registers do not make them faster than they are read;
 * if not, the two ops have to run one after the other. Results do not depend on the cut. */
static int kv_fused_cut(kv_fused *x) {
  const kv_attend *a = x->a;
  const kv_observers *o = x->observe.a;
  const int64_t heads = a->B * a->Hkv, G = heads ? a->H / a->Hkv : 1;
  kv_attend_job job = {.a = a};
  if (heads == 0 || o->R == 0) return 0;
  if (x->span < 0 && kv_attend_head_of(a, 0).query.amx) return 0; /* a product costs less there than keeping logits */
  kv_attend_cut(&job, heads, a->T * G);
  if (job.span || (x->span >= 0 && (o->R <= SHORT || o->R * G <= FEW))) return 0;
  for (int64_t b = 0; b < a->B; b++)
    if (!o->causal && o->stop[b] > a->S - o->R + o->row_first[b] + 1) return 0;
  x->tile = kv_max(TILE / G, 1), x->blocks = kv_max((job.most + kv_block(a->D) - 1) / kv_block(a->D), 1);
  const int64_t row = x->blocks * KEYS * (int64_t)sizeof(float),
                most = kv_min(LOGITS, SCRATCH / 2 / kv_threads()) / row;
  const int64_t fits = (most - 2 * TILE) / G; /* steps whose logits are kept: those of a range and a tile, or all R */
  x->steps = o->R > fits ? kv_min(job.steps, fits - x->tile) : job.steps;
  x->steps = kv_max(x->steps / x->tile, 1) * x->tile;
  x->keeps = kv_round_up(kv_min(x->steps + x->tile, o->R) * G, TILE) + TILE;
  x->ranges = (a->T + x->steps - 1) / x->steps, x->wave = x->ranges;
  if (x->keeps > most || x->steps * G < kv_min(LEAST_ROWS, a->T * G)) return 0;
  if (x->observe.how->out) x->wave = kv_min(x->ranges, (SCRATCH / 2 / (row * heads * G) - 3) / (x->steps / x->tile));
  x->tiles = kv_min(x->wave * (x->steps / x->tile) + 1, (o->R + x->tile - 1) / x->tile);
  return x->wave > 0;
}

/* Runs attend and reduces its last R rows, the observers, as `how` says. With a span the observers' lse is computed
 * over it. Returns 0 if the two ops have to run one after the other; nothing is computed then. */
static int kv_fused_run(const kv_attend *a, const kv_observers *rows, const void *op, const kv_reduction *how, int span,
                        kv_status *status) {
  const int64_t heads = a->B * a->Hkv, R = rows->R, size = (int64_t)sizeof(float);
  kv_fused x = {.a = a, .span = span, .observe = {op, how, rows, rows->lse, {a->H * a->T, a->T}, NULL, 0, 0}};
  if (!kv_fused_cut(&x)) return 0;
  const int64_t each = how->out ? heads * x.blocks * (a->H / a->Hkv) * KEYS * size : 0;
  float *const memory = aligned_alloc(64, (size_t)((x.tiles + 1) * each + kv_round_up(a->B * a->H * R * size, 64)));
  if (!memory) x.failed = 1;
  if (how->out) x.totals = memory, x.tile_totals = memory + each / size;
  if (span >= 0) {
    x.own_lse = memory + (x.tiles + 1) * each / size, x.observe.lse = x.own_lse;
    x.observe.lse_stride[0] = a->H * R, x.observe.lse_stride[1] = R;
  }
  for (; x.first < x.ranges && !x.failed; x.first = x.last) {
    x.last = kv_min(x.first + x.wave, x.ranges);
    kv_parallel_for(heads * (x.last - x.first), 1, kv_fused_body, &x);
    if (how->out && !x.failed) kv_parallel_for(heads * x.blocks, 1, kv_fused_add_body, &x);
  }
  free(memory);
  *status = x.failed ? KV_NO_MEMORY : KV_OK;
  return 1;
}
#endif
