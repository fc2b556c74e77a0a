/* The online softmax of a task's rows over blocks of packed keys and values. attend runs it; so does observe.h, without
 * values, to get the log-sum-exp of observing rows. */
#ifndef KVEVICT_ROWS_H
#define KVEVICT_ROWS_H
#include "state.h"
#include "tile.h"

/* A task's rows, in time-major order over the heads of the group: row r is head r % G at step t0 + r / G. */
typedef struct {
  float *q;       /* [rows, D] scaled queries; padded with rows of zeros to a multiple of PAD */
  kv_state state; /* softmax over the columns so far; o is padded as q is */
  float *k, *v;   /* a packed block of keys; a packed block of values */
  float *s, *row; /* [TILE, KEYS] logits, then weights; [VL, D] scratch of packing */
  /* Logits that are kept: [blocks of keys, keeps, KEYS], of the rows from `kept` on, a multiple of TILE, in blocks that
   * start at multiples of kv_block. all NULL: none are. A row's logits after those that it sees are undefined. */
  float *all;
  int64_t kept, keeps;
} kv_rows;

static inline void *kv_rows_alloc(kv_rows *x, int64_t rows, int64_t D, int values) {
  const int64_t padded = kv_round_up(rows, PAD), block = kv_block(D), width = values ? kv_round_up(D, VL) : 0;
  const int64_t tile = TILE + (KV_AMX ? SQUARE : 0); /* kv_row_o_amx reads 16 rows from any row on */
  const int64_t sizes[] = {padded * D, padded * width, padded, padded, block * D, block * width, tile * KEYS, VL * D};
  float **const fields[] = {&x->q, &x->state.o, &x->state.m, &x->state.d, &x->k, &x->v, &x->s, &x->row};
  x->all = NULL, x->kept = x->keeps = 0;
  return kv_carve(8, sizes, fields);
}

/* Loads the queries of `rows` rows from step t0 on and starts the rows' states. A sink is one more logit, without a
 * value, so a row with a sink starts with m = sink and d = 1. */
static inline void kv_rows_start(kv_rows *x, const kv_queries *query, int64_t t0, int64_t rows, const float *sinks,
                                 int64_t width) {
  const int64_t padded = kv_round_up(rows, PAD);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t g = r % query->G;
    kv_load_words(query, g, t0 + r / query->G, x->q + r * query->words);
    x->state.m[r] = sinks ? sinks[g] * KV_LOG2E : -INFINITY;
    x->state.d[r] = x->state.m[r] == -INFINITY ? 0 : 1;
  }
  memset(x->q + rows * query->words, 0, (size_t)((padded - rows) * query->words) * sizeof *x->q);
  memset(x->state.o, 0, (size_t)(padded * width) * sizeof *x->state.o);
}

/* Adds the block of columns c0 .. c1 - 1 to the states of rows r0 .. r0 + n - 1. The block's keys are packed in x->k;
 * its values v have rows `step` floats apart. finite: whether all numbers of v are finite. */
static inline void kv_rows_tile(kv_rows *x, const kv_queries *query, kv_bounds bounds, int64_t t0, int64_t r0,
                                int64_t n, int64_t c0, int64_t c1, const float *v, int64_t step, int64_t width,
                                int finite) {
  const int64_t G = query->G, block = c1 - c0;
  const int64_t fewest = kv_min(kv_seen(bounds, t0 + r0 / G) - c0, block);
  const int64_t most = kv_min(kv_seen(bounds, t0 + (r0 + n - 1) / G) - c0, block);
  const int pairs = query->pairs && width;                       /* weights become bf16 only to multiply values */
  const int64_t whole = query->amx ? 2 * SQUARE : pairs ? 2 : 1; /* number of columns that are multiplied together */
  const int same = fewest == most && most % whole == 0;          /* all rows see every column that is multiplied */
  float alpha[TILE] = {0}, *logits = x->s;
  const kv_state state = kv_state_from(x->state, width, r0);
  if (most <= 0) return;
  if (x->all && r0 >= x->kept) logits = x->all + (c0 / kv_block(query->D) * x->keeps + r0 - x->kept) * KEYS;
  kv_tile_s(query, x->q + r0 * query->words, n, x->k, most, logits);
  for (int64_t r = 0; r < n; r++) {
    const int64_t seen = fewest == most ? most : kv_min(kv_max(kv_seen(bounds, t0 + (r0 + r) / G) - c0, 0), most);
    const int64_t span = kv_round_up(most, VL << pairs);
    float *const s = logits + r * KEYS, *const p = x->s + r * KEYS;
    kv_cap_and_mask(s, query->cap, seen, span);
    alpha[r] = kv_softmax(pairs, s, p, span, state.m + r, state.d + r);
    if (!finite && !same && width) kv_row_o(pairs, query->amx, p, seen, v, width, alpha[r], state.o + r * width);
  }
  if (finite || same) kv_tile_o(pairs, query->amx, x->s, n, most, v, step, width, alpha, state.o);
}

/* Adds to each row's state those columns of c0 .. c1 - 1 that the row sees. If v is NULL, there are no values, and only
 * m and d are computed. Where every row sees a whole block, the block's values may be inf or NaN, and they are read in
 * place if they are stored as floats. */
static inline void kv_rows_run(kv_rows *x, const kv_queries *query, kv_bounds bounds, int64_t t0, int64_t rows,
                               const kv_columns *k, const kv_columns *v, int64_t width, int64_t c0, int64_t c1) {
  const int64_t most = rows > 0 ? kv_seen(bounds, t0 + (rows - 1) / query->G) : 0, block = kv_block(query->D);
  const kv_amx before = kv_tiles_begin(query->amx);
  c1 = kv_min(c1, most);
  for (int64_t c = c0; c < c1; c += block) {
    const int64_t columns = kv_min(block, c1 - c);
    int64_t step = width;
    const int all = kv_seen(bounds, t0) >= c + columns;
    const float *values = v && all && !query->pairs ? kv_values_in_place(v, c, columns, width, &step) : NULL;
    const int packed = v && !values, finite = !packed || kv_pack_v(v, query->pairs, c, columns, x->v, width);
    kv_pack_k(k, query->pairs, c, columns, x->k, x->row);
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
      kv_rows_tile(x, query, bounds, t0, r0, kv_min(TILE, rows - r0), c, c + columns, packed ? x->v : values, step,
                   width, finite);
  }
  kv_tiles_end(query->amx, before);
}

/* Returns how many of one head's T steps a task takes: about four tasks for every thread, but at least about 192 rows,
 * to amortise packing, and at most `most` rows, to keep scratch below 2 MiB. */
static inline int64_t kv_task_steps(int64_t heads, int64_t T, int64_t G, int64_t D) {
  const int64_t most = 131072 / kv_max(D, 64), fair = heads * T * G / (4 * kv_threads());
  return kv_max(kv_min(kv_max(fair, 192), most) / G, 1);
}
#endif
