/* Attention of a few query rows over many slots. It is limited by memory bandwidth, so slots are read once and in
 * place, and up to SHARE rows share each load. A row's sums run over the slots in ascending order, whatever other rows
 * are computed with it, and their bits do not depend on whether the slots lie in one segment or two. Logits are in log2
 * units. */
#ifndef KVEVICT_STREAM_H
#define KVEVICT_STREAM_H
#include "products.h"
#include "state.h"

enum { SPLIT = 512 /* slots of a split; splits are computed separately and their states merged in order */ };

/* Permutes x [width], a query, into the order in which kv_stream_half loads bf16 as floats; other forms keep their
 * order. If `back`, x is an output, which is permuted from this order and whose Hadamard transform is undone. */
static inline void kv_stream_order(const kv_stream *stream, int back, float *x) {
  if (back && stream->rotated) kv_hadamard(x, stream->D);
  if ((back ? stream->v_form : stream->k_form) != KV_FROM_BF16) return;
  for (int64_t d = 0; d + 2 * VL <= stream->width; d += 2 * VL, x += 2 * VL) {
    float pair[2 * VL];
    memcpy(pair, x, sizeof pair);
    for (int i = 0; i < 2 * VL; i++) {
      const int other = i % 2 * VL + i / 2;
      x[back ? i : other] = pair[back ? other : i];
    }
  }
}

static inline kv_stream kv_stream_of(kv_dtype dtype, int64_t D, int64_t rows, const kv_slots *slots) {
  const int packed = slots->k_kind != KV_AS_COMPUTED || slots->v_kind != KV_AS_COMPUTED;
  kv_stream x = {.dtype = dtype, .in_place = D % VL == 0 && !packed, .D = D, .width = kv_round_up(D, VL), .rows = rows};
  const kv_form floats = x.in_place ? (kv_form)dtype : KV_FROM_F32;
  x.k_form = kv_form_of(slots->k_kind, dtype, D, floats);
  x.v_form = slots->v_kind == KV_AS_COMPUTED ? floats : kv_form_of(slots->v_kind, dtype, D, floats);
  x.rotated = x.v_form == KV_BY_INT4;
  return x;
}

/* Allocates the scratch of x. Returns the memory, which the caller frees; NULL if there is none. The padding of q and
 * of buffer starts as 0 and stays 0. */
static inline void *kv_stream_alloc(kv_stream *x) {
  float **const fields[] = {&x->q, &x->s, &x->buffer, &x->alpha, &x->words, &x->by, &x->sum, &x->more};
  const int64_t n = x->rows, buffer = x->in_place ? 0 : BLOCK * x->width, words = kv_is_words(x->k_form) ? n : 0;
  const int64_t sizes[] = {n * x->width, n * KEYS, buffer, n, words * x->D / 2, words, words, words};
  void *memory = kv_carve(8, sizes, fields);
  if (!memory) return NULL;
  memset(x->q, 0, (size_t)sizes[0] * sizeof *x->q);
  memset(x->buffer, 0, (size_t)sizes[2] * sizeof *x->buffer);
  return memory;
}

/* Stores q [D], the query of row r, as words for packed keys. These hold k - centre, and q . k = q . (k - centre) +
 * q . centre; x->more gets the last term. */
static inline void kv_stream_load_words(const kv_stream *x, int64_t r, const float *q, const float *centre) {
  float row[KV_MOST_D];
  int16_t words[KV_MOST_D], *to = (int16_t *)(void *)x->words + r * x->D;
  const int pairs = x->k_form == KV_BY_INT4 ? 2 : 1;
  vf sum = vf_set1(0), more = vf_set1(0);
  memcpy(row, q, (size_t)x->D * sizeof *row);
  for (int64_t d = 0; centre && d < x->D; d += VL) more += vf_load(q + d) * vf_load(centre + d);
  if (pairs == 2) kv_hadamard(row, x->D);
  for (int64_t d = 0; d < x->D; d += VL) sum += vf_load(row + d);
  x->by[r] = kv_words_of(row, x->D, words);
  x->sum[r] = vf_sum(sum), x->more[r] = vf_sum(more);
  for (int64_t d = 0; d < x->D; d += WORDS) /* 4-bit keys: vectors of the lower and the upper half of D alternate */
    memcpy(to + d, words + d / WORDS % pairs * (x->D / 2) + d / (pairs * WORDS) * WORDS, WORDS * sizeof *words);
}

/* Loads the queries of rows r0 .. r0 + n - 1, in the form in which the keys k are multiplied. Row r0 + i is head i % G
 * at step i / G. */
static inline void kv_stream_load(const kv_stream *x, const kv_queries *query, int64_t r0, int64_t n,
                                  const kv_columns *k) {
  for (int64_t i = 0, r = r0; i < n; i++, r++) {
    float *q = x->q + r * x->width;
    kv_load_query(query, i % query->G, i / query->G, q);
    if (x->k_form == KV_BY_BF16) { /* the words are neither converted nor scaled: their products are scaled later */
      kv_load_words(query, i % query->G, i / query->G, x->words + r * x->D / 2);
      x->by[r] = query->scale, x->more[r] = 0;
    } else if (kv_is_words(x->k_form)) {
      kv_stream_load_words(x, r, q, k->centre);
    }
    kv_stream_order(x, 0, q);
  }
}

/* Splits slots c .. c + n - 1 into one or two pieces and returns the number of pieces. A piece lies in place, or is
 * converted into x->buffer, whose padding stays 0. rotated: stored values are Hadamard-transformed (4 bits), so new
 * values are transformed, too. */
static inline int kv_stream_pieces(const kv_stream *x, const kv_columns *columns, kv_form form, int rotated, int64_t c,
                                   int64_t n, kv_stream_rows *piece) {
  const int packed = form > KV_BY_BF16;
  char *to = (char *)x->buffer;
  if (packed ? c >= columns->packed : form == KV_FROM_F32 && !x->in_place) {
    for (int64_t i = 0; i < n; i++) {
      kv_column_load(columns, c + i, x->buffer + i * x->width);
      if (rotated) kv_hadamard(x->buffer + i * x->width, x->D);
    }
    piece[0] = (kv_stream_rows){KV_FROM_F32, n, x->width / VL, x->width * (int64_t)sizeof *x->buffer, to};
    return 1;
  }
  const kv_run run = kv_columns_run(columns, c, n);
  piece[0] = (kv_stream_rows){form, run.n, kv_is_words(form) ? x->D / WORDS : x->width / VL, run.stride, run.x};
  if (run.n == n) return 1;
  if (packed && c + n <= columns->packed) { /* copied into one piece, so that all weights share a scale */
    for (int64_t i = 0; i < n; i++) memcpy(to + i * run.stride, kv_column(columns, c + i), (size_t)run.stride);
    piece[0].n = n, piece[0].x = to;
    return 1;
  }
  return 1 + kv_stream_pieces(x, columns, form, rotated, c + run.n, n - run.n, piece + 1);
}

/* Returns the address of column c, from which memory is fetched ahead while `piece` is multiplied. The products of
 * `piece` fetch as many bytes as its vectors take. Packed rows are longer than their vectors, so the remaining bytes
 * are fetched here: a missing cache line costs as much as a row. */
static inline kv_stream_next kv_stream_ahead(const kv_columns *x, int64_t c, const kv_stream_rows *piece) {
  const kv_stream_next next = kv_columns_ahead(x, c);
  const int64_t end = c < x->packed ? piece->n * x->at.stored_stride : 0;
  for (int64_t at = piece->n * piece->vectors * kv_vector_bytes(piece->form); at < end; at += 64)
    kv_stream_fetch(next, at, 64);
  return next;
}

/* Adds slots c0 .. c1 - 1 to the states of rows r0 .. r1 - 1, which all see these slots. `state` begins with row 0's
 * state. `logit`, unless NULL, gets the logits: those of row r begin at logit + r * apart. */
static inline void kv_stream_run(const kv_stream *x, float cap, const kv_columns *k, const kv_columns *v, int64_t c0,
                                 int64_t c1, int64_t r0, int64_t r1, kv_state state, float *logit, int64_t apart) {
  kv_stream_rows piece[2];
  for (int64_t c = c0; c < c1; c += BLOCK) {
    const int64_t n = kv_min(BLOCK, c1 - c);
    int count = kv_stream_pieces(x, k, x->k_form, 0, c, n, piece);
    for (int64_t r = r0, G; r < r1; r += G) {
      G = kv_stream_share(r1 - r);
      for (int64_t i = 0, at = 0; i < count; at += piece[i++].n)
        kv_stream_keys(x, r, G, piece + i, r == r0 ? kv_stream_ahead(v, c + at, piece + i) : 0, x->s + r * KEYS + at);
    }
    for (int64_t r = r0; r < r1; r++) {
      float *s = x->s + r * KEYS;
      kv_cap_and_mask(s, cap, n, BLOCK);
      if (logit) memcpy(logit + r * apart + c, s, (size_t)kv_round_up(n, VL) * sizeof *s);
      x->alpha[r] = kv_softmax(0, s, s, BLOCK, state.m + r, state.d + r);
    }
    count = kv_stream_pieces(x, v, x->v_form, x->rotated, c, n, piece);
    for (int64_t r = r0, G; r < r1; r += G) {
      G = kv_stream_share(r1 - r);
      for (int64_t i = 0, at = 0; i < count; at += piece[i++].n)
        kv_stream_values(x, G, x->s + r * KEYS + at, piece + i,
                         r == r0 ? kv_stream_ahead(k, c + BLOCK + at, piece + i) : 0, i ? NULL : x->alpha + r,
                         state.o + r * x->width);
    }
  }
}

/* Returns how many splits a thread takes at once: as many as have about 32k numbers of K, since waking a thread costs
 * more than computing these. */
static inline int64_t kv_stream_grain(const kv_stream *x, int64_t slots) {
  return kv_max(1, 32768 / (kv_min(SPLIT, kv_max(slots, 1)) * x->D));
}
#endif
