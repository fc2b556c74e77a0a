/* A few rows of queries against many slots, read once and in place: limited by memory bandwidth. Each load is shared
 * by up to SHARE rows. A row's sums run over the slots in ascending order whatever else is computed with it, and
 * where the slots lie (in one segment or two) changes no bit. Logits are in log2 units. */
#ifndef KVEVICT_STREAM_H
#define KVEVICT_STREAM_H
#include "tile.h"
#include "words.h"

enum {
  SPLIT = 512, /* slots of a split: its state (state.h) is computed apart, states are merged in order */
  BLOCK = 64,  /* slots of a block: it fits the first-level cache */
  SHARE = 4,   /* rows that share a load, at most */
#if defined(__AVX512F__) || defined(__aarch64__)
  TOGETHER = 4, /* of SHARE rows those that are computed at once: 4 slots of each fit 32 registers */
#else
  TOGETHER = 2, /* 16 registers */
#endif
};

typedef struct {
  kv_dtype dtype;
  int in_place; /* whether D is whole vectors */
  int64_t D, width, rows;
  kv_form k_form, v_form;         /* of stored rows */
  int rotated;                    /* whether o is, as values of 4 bits are */
  float *q, *s, *buffer, *alpha;  /* [rows, width] scaled, [rows, KEYS], [BLOCK, width], [rows] */
  float *words, *by, *sum, *more; /* a query as words [rows, D / 2], the scale of its products, its sum, q . centre */
} kv_stream;

/* n rows of `vectors` vectors, `stride` bytes apart. */
typedef struct {
  kv_form form;
  int64_t n, vectors, stride;
  const char *x;
} kv_stream_rows;

/* The memory that is read after the rows at hand: as many bytes of it are fetched into the second-level cache
 * meanwhile, in order, so that memory is never idle. A prefetch never faults, so it may lie past the slots; it is an
 * integer because no pointer may leave its array. 0: nothing. */
typedef uintptr_t kv_stream_next;

/* Of it the bytes from `from` on; `bytes` is a constant at every call. */
KV_INLINE void kv_stream_fetch(kv_stream_next next, int64_t from, int bytes) {
  const kv_stream_next at = next + (kv_stream_next)from;
  if (next && (bytes >= 64 || at % 64 < (kv_stream_next)bytes))
#pragma GCC unroll 32
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const void *)(at + (kv_stream_next)i), 0, 2);
}

KV_INLINE int kv_is_words(kv_form form) { return form >= KV_BY_BF16; }

/* Bytes of a vector's numbers in a row. */
KV_INLINE int kv_vector_bytes(kv_form form) {
  return VL * (form == KV_FROM_F32 || form == KV_BY_BF16 ? 4 : form == KV_BY_INT4 ? 1 : 2);
}

/* Of two vectors of a row, that begin at x, the first (half 0) or the last (1), or the last of an odd number (2).
 * Halves of bf16 as floats are the numbers at even and at odd places: a shift or a mask makes them. q and o have
 * that order. */
KV_INLINE vf kv_stream_half(kv_form form, int half, const char *x) {
  if (form == KV_BY_INT4) return (vf)kv_nibbles(x, half);
  if (form == KV_FROM_BF16 && half < 2) {
    const vu words = vu_load(x);
    return (vf)(half ? words & 0xffff0000u : words << 16);
  }
  x += half % 2 * kv_vector_bytes(form);
  if (form == KV_FROM_BF16) return (vf)(vu_of_16bit(x) << 16);
  if (form == KV_FROM_F32) return vf_load((const float *)(const void *)x);
  if (form == KV_FROM_F16) return vf_of_f16(x);
  return form == KV_BY_INT8 ? (vf)kv_signed(x) : (vf)vu_load(x);
}

/* x [width], a query or an output, into that order, or back. */
static inline void kv_stream_order(const kv_stream *stream, int back, float *x) {
  if (back && stream->rotated) kv_hadamard(x, stream->D);
  if ((back ? stream->v_form : stream->k_form) != KV_FROM_BF16) return;
  for (int64_t d = 0; d + 2 * VL <= stream->width; d += 2 * VL, x += 2 * VL) {
    float pair[2 * VL];
    memcpy(pair, x, sizeof pair);
    for (int i = 0; i < 2 * VL; i++) {
      const int other = i % 2 * VL + i / 2;
      if (back)
        x[i] = pair[other];
      else
        x[other] = pair[i];
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

/* Its scratch, to be freed; NULL if out of memory. The padding of q and buffer starts as 0 and stays it. */
static inline void *kv_stream_alloc(kv_stream *x) {
  float **const fields[] = {&x->q, &x->s, &x->buffer, &x->alpha, &x->words, &x->by, &x->sum, &x->more};
  const int64_t rows = kv_is_words(x->k_form) ? x->rows : 0; /* of words */
  const int64_t sizes[] = {x->rows * x->width,
                           x->rows * KEYS,
                           x->in_place ? 0 : BLOCK * x->width,
                           x->rows,
                           rows * x->D / 2,
                           rows,
                           rows,
                           rows};
  void *memory = kv_carve(8, sizes, fields);
  if (!memory) return NULL;
  memset(x->q, 0, (size_t)sizes[0] * sizeof *x->q);
  memset(x->buffer, 0, (size_t)sizes[2] * sizeof *x->buffer);
  return memory;
}

/* q [D] as words for packed keys around a centre: q . k = q . (k - centre) + q . centre. */
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
  for (int64_t d = 0; d < x->D; d += WORDS) /* of 4 bits a vector from either half in turns */
    memcpy(to + d, words + d / WORDS % pairs * (x->D / 2) + d / (pairs * WORDS) * WORDS, WORDS * sizeof *words);
}

/* The rows, time-major over the heads of the group as those of kv_rows, for these keys. */
static inline void kv_stream_load(const kv_stream *x, const kv_queries *query, int64_t t0, const kv_columns *k) {
  for (int64_t r = 0; r < x->rows; r++) {
    float *q = x->q + r * x->width;
    kv_load_query(query, r % query->G, t0 + r / query->G, q);
    if (x->k_form == KV_BY_BF16) { /* without conversion: products are scaled later */
      kv_load_words(query, r % query->G, t0 + r / query->G, x->words + r * x->D / 2);
      x->by[r] = query->scale, x->more[r] = 0;
    } else if (kv_is_words(x->k_form)) {
      kv_stream_load_words(x, r, q, k->centre);
    }
    kv_stream_order(x, 0, q);
  }
}

/* acc [G, slots] += q . k, of the vectors j and, of halves, j + 1. */
KV_INLINE void kv_stream_products(kv_form form, int G, int slots, int64_t last, int half, int64_t j, const float *q,
                                  kv_stream_rows k, vf *acc) {
  vf y[SHARE];
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) {
    y[g] = vf_load(q + (g * k.vectors + j + half % 2) * VL);
    KV_KEEP(y[g]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < slots; i++) {
    const vf x = kv_stream_half(form, half, k.x + kv_min(i, last) * k.stride + j * kv_vector_bytes(form));
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      vf *to = acc + g * slots + i;
      *to = kv_is_words(form) ? vf_add_words(form, *to, (kv_v16)x, (kv_v16)y[g]) : *to + x * y[g];
    }
  }
}

/* s [G, KEYS], the columns 0 .. last of it, = q [G, k.vectors * VL] . k; those after them, up to `slots`, become any
 * numbers. form, G and slots are constants at every call. */
KV_INLINE void kv_stream_dots(kv_form form, int G, int slots, int64_t last, const float *q, kv_stream_rows k,
                              kv_stream_next next, float *s) {
  vf acc[16] = {{0}};
  float sums[16];
  int64_t j = 0;
  for (; j + 2 <= k.vectors; j += 2) {
    kv_stream_fetch(next, j * slots * kv_vector_bytes(form), 2 * slots * kv_vector_bytes(form));
    kv_stream_products(form, G, slots, last, 0, j, q, k, acc);
    kv_stream_products(form, G, slots, last, 1, j, q, k, acc);
  }
  if (j < k.vectors && form != KV_BY_INT4) kv_stream_products(form, G, slots, last, 2, j, q, k, acc);
#pragma GCC unroll 4
  for (int i = 0; i < G * slots; i += VL) vf_store(sums + i, vf_sums(form > KV_BY_BF16, acc + i));
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) memcpy(s + g * KEYS, sums + g * slots, (size_t)slots * sizeof *s);
}

/* s [G, KEYS], k.n columns of it, = q [G, k.vectors * VL] . k. */
KV_INLINE void kv_stream_logits_of(kv_form form, int G, const float *q, kv_stream_rows k, kv_stream_next next,
                                   float *s) {
  const int apart = G == SHARE ? TOGETHER : G, slots = apart == 1 ? 8 : 4; /* at once: with more bf16 is read slower */
  for (int64_t c = 0; c < k.n; c += slots, k.x += slots * k.stride) {
#pragma GCC unroll 2
    for (int g = 0; g < G; g += apart)
      if (c + slots <= k.n)
        kv_stream_dots(form, apart, slots, slots - 1, q + g * k.vectors * VL, k, g ? 0 : next, s + g * KEYS + c);
      else
        kv_stream_dots(form, apart, slots, k.n - c - 1, q + g * k.vectors * VL, k, 0, s + g * KEYS + c);
    if (next) next += (kv_stream_next)(slots * k.vectors * kv_vector_bytes(form));
  }
}

/* o [G, nv * VL] = alpha o + p [G, KEYS] v [n, nv * VL], where rows of o are v.vectors * VL apart; alpha NULL: 1. */
KV_INLINE void kv_stream_sum(kv_form form, int G, int nv, const float *p, kv_stream_rows v, kv_stream_next next,
                             const float *alpha, float *o) {
  vf acc[SHARE][8];
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) acc[g][j] = (alpha ? alpha[g] : 1) * vf_load(o + (g * v.vectors + j) * VL);
  for (int64_t c = 0; c < v.n; c++, v.x += v.stride) {
    kv_stream_fetch(next, c * nv * kv_vector_bytes(form), nv * kv_vector_bytes(form));
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) {
      const vf x = kv_stream_half(form, nv == 1 ? 2 : j % 2, v.x + j / 2 * 2 * kv_vector_bytes(form));
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g][j] += p[g * KEYS + c] * x;
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) vf_store(o + (g * v.vectors + j) * VL, acc[g][j]);
}

/* Of a block: the weights of its rows as words [SHARE, BLOCK], of 16 bits times `by`, and a term of every number. */
typedef struct {
  int16_t words[SHARE * BLOCK];
  float by[SHARE], more[SHARE];
} kv_stream_weights;

/* The same with weights as words. Rows of o are D apart; of 4 bits the vectors are those of either half in turns. */
KV_INLINE void kv_stream_sum_words(kv_form form, int G, int nv, const kv_stream_weights *w, kv_stream_rows v,
                                   kv_stream_next next, int64_t D, const float *alpha, float *o) {
  static const char zeros[4 * WORDS];
  const int64_t step = form == KV_BY_INT4 ? D / 2 : WORDS;
  vf acc[SHARE][8] = {{{0}}};
  for (int64_t c = 0; c < v.n; c += 2, v.x += 2 * v.stride) {
    const char *second = c + 1 < v.n ? v.x + v.stride : zeros;
    kv_stream_fetch(next, c * nv * kv_vector_bytes(form), 2 * nv * kv_vector_bytes(form));
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      const int half = nv == 1 ? 2 : j % 2;
      const int64_t at = j / 2 * 2 * kv_vector_bytes(form);
      const kv_v16 a = (kv_v16)kv_stream_half(form, half, v.x + at),
                   b = (kv_v16)kv_stream_half(form, half, second + at);
      const kv_v16 low = kv_low16(a, b), high = kv_high16(a, b);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const kv_v16 y = kv_pair16(w->words + g * BLOCK + c);
        acc[g][2 * j] = vf_add_words(form, acc[g][2 * j], low, y);
        acc[g][2 * j + 1] = vf_add_words(form, acc[g][2 * j + 1], high, y);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      const vf low = vf_of_vi((vi)acc[g][2 * j]), high = vf_of_vi((vi)acc[g][2 * j + 1]);
      const vf first = KV_FIRST(low, high), last = KV_SECOND(low, high);
      float *to = o + g * D + (form == KV_BY_INT4 ? j / 2 * WORDS + j % 2 * step : j * step);
      const float by = alpha ? alpha[g] : 1;
      vf_store(to, by * vf_load(to) + w->by[g] * first + w->more[g]);
      vf_store(to + VL, by * vf_load(to + VL) + w->by[g] * last + w->more[g]);
    }
}

/* o [G, width] = alpha o + p [G, KEYS] v, p as it is or as the words w. */
KV_INLINE void kv_stream_values_of(kv_form form, int G, const float *p, const kv_stream_weights *w, kv_stream_rows v,
                                   kv_stream_next next, int64_t D, const float *alpha, float *o) {
  const int most = kv_is_words(form) ? (TOGETHER == 4 && G < 3 ? 4 : 2) : G == 1 ? 8 : G == SHARE ? TOGETHER : 4;
  for (int64_t j = 0, nv; j < v.vectors; j += nv) {
    nv = v.vectors - j >= most ? most : kv_min(v.vectors - j, 2);
    kv_stream_rows some = v;
    some.x += j * kv_vector_bytes(form);
    float *to = o + j * (kv_is_words(form) ? (form == KV_BY_INT4 ? WORDS / 2 : WORDS) : VL);
#define KV_CASE(count)                                                \
  if (kv_is_words(form))                                              \
    kv_stream_sum_words(form, G, count, w, some, next, D, alpha, to); \
  else                                                                \
    kv_stream_sum(form, G, count, p, some, next, alpha, to)
    if (nv == most) {
      KV_CASE(most);
    } else if (nv == 2) {
      KV_CASE(2);
    } else if (form != KV_BY_INT4) {
      KV_CASE(1);
    }
#undef KV_CASE
    next += next ? (uintptr_t)(v.n * nv * kv_vector_bytes(form)) : 0;
  }
}

/* How many of `left` rows share loads next: 4 and then 1 would take as long as 4 and 4. */
static inline int64_t kv_stream_share(int64_t left) { return left > SHARE && left < 7 ? 3 : kv_min(left, SHARE); }

#define KV_EACH_SHARE(X, form) X(form, 1) X(form, 2) X(form, 3) X(form, 4)
#define KV_EACH_FORM(X)          \
  KV_EACH_SHARE(X, KV_FROM_F32)  \
  KV_EACH_SHARE(X, KV_FROM_F16)  \
  KV_EACH_SHARE(X, KV_FROM_BF16) \
  KV_EACH_SHARE(X, KV_BY_BF16)   \
  KV_EACH_SHARE(X, KV_BY_INT8)   \
  KV_EACH_SHARE(X, KV_BY_INT4)
/* Whether this instruction set has rows of that form. */
#define KV_HAS(form) (form < KV_BY_BF16 || (form == KV_BY_BF16 ? KV_BF16_WORDS : KV_WORDS))

/* The products s [G, KEYS] of rows from r on with keys of that form -> logits. */
KV_INLINE void kv_stream_scale(const kv_stream *x, kv_form form, int64_t r, int64_t G, kv_stream_rows k, float *s) {
  float scale[BLOCK], least[BLOCK];
  if (form != KV_BY_BF16) kv_words_ends(form, x->D, k.x, k.stride, k.n, scale, least);
  for (int64_t g = r; g < r + G; g++, s += KEYS)
#pragma GCC unroll 4
    for (int64_t c = 0; c < BLOCK; c += VL) {
      vf by = vf_set1(x->by[g]), more = vf_set1(x->more[g]);
      if (form != KV_BY_BF16) by *= vf_load(scale + c);
      if (form == KV_BY_INT4) more += x->sum[g] * vf_load(least + c);
      vf_store(s + c, vf_load(s + c) * by + more);
    }
}

/* Rows r .. r + G - 1: s [G, KEYS], the columns of a piece, from its keys. */
static void kv_stream_keys(const kv_stream *x, int64_t r, int64_t G, const kv_stream_rows *piece, kv_stream_next next,
                           float *s) {
  const kv_stream_rows k = *piece;
  const float *q = kv_is_words(k.form) ? x->words + r * x->D / 2 : x->q + r * x->width;
#define KV_CASE(as, count)                                         \
  case 4 * as + count:                                             \
    if (KV_HAS(as)) kv_stream_logits_of(as, count, q, k, next, s); \
    break;
  switch (4 * (int)k.form + (int)G) { KV_EACH_FORM(KV_CASE) }
#undef KV_CASE
  if (k.form == KV_BY_BF16) kv_stream_scale(x, KV_BY_BF16, r, G, k, s);
  if (k.form == KV_BY_INT8) kv_stream_scale(x, KV_BY_INT8, r, G, k, s);
  if (k.form == KV_BY_INT4) kv_stream_scale(x, KV_BY_INT4, r, G, k, s);
}

/* p [G, KEYS] as the weights of packed rows. */
KV_INLINE void kv_stream_weigh(kv_form form, kv_stream_rows v, int64_t D, int64_t G, const float *p,
                               kv_stream_weights *w) {
  float scale[BLOCK], least[BLOCK], weight[BLOCK];
  kv_words_ends(form, D, v.x, v.stride, v.n, scale, least);
  for (int64_t g = 0; g < G; g++, p += KEYS) {
    int16_t *words = w->words + g * BLOCK;
    vf sum = vf_set1(0), all = vf_set1(0);
#pragma GCC unroll 4
    for (int c = 0; c < BLOCK; c += VL) { /* p of another piece meets a scale of 0 */
      const vf y = vf_load(p + c) * vf_load(scale + c);
      vf_store(weight + c, y);
      all += y;
      if (form == KV_BY_INT4) sum += vf_load(p + c) * vf_load(least + c);
    }
    w->by[g] = kv_words_of(weight, BLOCK, words);
    if (form == KV_BY_INT4) { /* the rounding of weights times 7.5, the middle
                                 of 4 bits, is taken out */
      int32_t rounded = 0;
      for (int c = 0; c < BLOCK; c++) rounded += words[c];
      sum[0] += 7.5f * (vf_sum(all) - w->by[g] * (float)rounded);
    }
    w->more[g] = form == KV_BY_INT4 ? vf_sum(sum) : 0;
  }
}

/* o [G, width] = alpha o + p [G, KEYS] v of a piece; alpha NULL: 1. */
static void kv_stream_values(const kv_stream *x, int64_t G, const float *p, const kv_stream_rows *piece,
                             kv_stream_next next, const float *alpha, float *o) {
  const kv_stream_rows v = *piece;
  kv_stream_weights w;
  if (v.form == KV_BY_INT8) kv_stream_weigh(KV_BY_INT8, v, x->D, G, p, &w);
  if (v.form == KV_BY_INT4) kv_stream_weigh(KV_BY_INT4, v, x->D, G, p, &w);
#define KV_CASE(as, count)                                                                              \
  case 4 * as + count:                                                                                  \
    if (KV_HAS(as) && as != KV_BY_BF16) kv_stream_values_of(as, count, p, &w, v, next, x->D, alpha, o); \
    break;
  switch (4 * (int)v.form + (int)G) { KV_EACH_FORM(KV_CASE) }
#undef KV_CASE
}

/* The slots c .. c + n - 1 as at most two pieces: in place, or converted into the buffer (its padding stays 0).
 * Values beside values of 4 bits are rotated as these are. */
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
  if (packed && c + n <= columns->packed) { /* of two buffers: as one, so that weights share a scale */
    for (int64_t i = 0; i < n; i++) memcpy(to + i * run.stride, kv_column(columns, c + i), (size_t)run.stride);
    piece[0].n = n, piece[0].x = to;
    return 1;
  }
  return 1 + kv_stream_pieces(x, columns, form, rotated, c + run.n, n - run.n, piece + 1);
}

/* Column c and those after it, to be fetched while a piece is read. Packed rows are longer than the numbers of the piece
 * that its reader counts: the rest is fetched at once, since a line that is not costs as much as a row. */
static inline kv_stream_next kv_stream_ahead(const kv_columns *x, int64_t c, const kv_stream_rows *piece) {
  const kv_stream_next next = kv_columns_ahead(x, c);
  const int64_t end = c < x->packed ? piece->n * x->at.stored_stride : 0;
  for (int64_t at = piece->n * piece->vectors * kv_vector_bytes(piece->form); at < end; at += 64)
    kv_stream_fetch(next, at, 64);
  return next;
}

/* The states of rows r0 .. r1 - 1 go on over the slots c0 .. c1 - 1, which all of these rows see. state, logit: of row 0;
 * logits of rows lie `apart` apart, or logit is NULL. */
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
      x->alpha[r] = kv_softmax(0, s, BLOCK, state.m + r, state.d + r);
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

/* Splits of a range of work: for less than about 32k numbers of K, waking a thread costs more than it saves. */
static inline int64_t kv_stream_grain(const kv_stream *x, int64_t slots) {
  return kv_max(1, 32768 / (kv_min(SPLIT, kv_max(slots, 1)) * x->D));
}
#endif
