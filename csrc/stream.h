/* A few rows of queries against many slots, read once and in place: limited by memory bandwidth. Each load is
 * shared by up to SHARE rows. A row's sums run over the slots in ascending order whatever else is computed with it, and
 * where the slots lie (in one segment or two) changes no bit. Logits are in log2 units. */
#ifndef KVEVICT_STREAM_H
#define KVEVICT_STREAM_H
#include "tile.h"
#include "words.h"

enum {
  SPLIT = 512, /* slots of a split: its m, l and o are computed apart and combined in order */
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
  kv_packing k_words, v_words;             /* packed rows are read as words; o is then rotated as they are */
  float *q, *s, *buffer, *alpha;           /* [rows, width] scaled, [rows, KEYS], [BLOCK, width], [rows] */
  float *words, *q_scale, *q_sum, *q_more; /* of words.h: int16 [rows, D], [rows] */
} kv_stream;

/* n rows of numbers, `stride` bytes apart. */
typedef struct {
  kv_dtype dtype;
  int64_t n, width, stride;
  const char *x;
  kv_packing packing;
} kv_stream_rows;

/* The memory read after the rows at hand: as many bytes of it are fetched into the second-level cache meanwhile,
 * in order, so that memory is never idle. A prefetch never faults, so it may lie past the slots; it is an integer
 * because no pointer may leave its array. 0: nothing. */
typedef uintptr_t kv_stream_next;

KV_INLINE void kv_stream_fetch(kv_stream_next next, int64_t bytes) {
  __builtin_prefetch((const void *)(next + (uintptr_t)bytes), 0, 2);
}

/* Of 2 VL numbers the first VL (half 0) or the last; of bf16 those at even or at odd places: a shift or a mask
 * makes them floats. q and o have the same order. */
KV_INLINE vf kv_stream_half(kv_dtype dtype, int half, const char *x) {
  if (dtype == KV_F32) return vf_load((const float *)(const void *)x + half * VL);
  if (dtype == KV_F16) return vf_of_f16(x + half * 2 * VL);
  const vu words = vu_load(x);
  return (vf)(half ? words & 0xffff0000u : words << 16);
}

/* The last VL numbers where D is an odd number of vectors. */
KV_INLINE vf kv_stream_last(kv_dtype dtype, const char *x) {
  return dtype == KV_BF16 ? (vf)(vu_of_16bit(x) << 16) : kv_stream_half(dtype, 0, x);
}

/* x [width], a query or an output, into that order, or back. */
static inline void kv_stream_order(const kv_stream *stream, int back, float *x) {
  if (back && kv_is_rotated(stream->v_words)) kv_hadamard(x, stream->D);
  if (!stream->in_place || stream->dtype != KV_BF16) return;
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
  const int packed = slots->k_packing != KV_AS_COMPUTED || slots->v_packing != KV_AS_COMPUTED;
  kv_stream x = {.dtype = dtype, .in_place = D % VL == 0 && !packed, .D = D, .width = kv_round_up(D, VL), .rows = rows};
  if (kv_has_words(slots->k_packing, D)) x.k_words = slots->k_packing;
  if (kv_has_words(slots->v_packing, D)) x.v_words = slots->v_packing;
  return x;
}

/* Its scratch, to be freed; NULL if out of memory. The padding of q and buffer starts as 0 and stays it. */
static inline void *kv_stream_alloc(kv_stream *x) {
  float **const fields[] = {&x->q, &x->s, &x->buffer, &x->alpha, &x->words, &x->q_scale, &x->q_sum, &x->q_more};
  const int64_t words = x->k_words ? x->rows : 0;
  const int64_t sizes[] = {x->rows * x->width,
                           x->rows * KEYS,
                           x->in_place ? 0 : BLOCK * x->width,
                           x->rows,
                           words * x->D / 2,
                           words,
                           words,
                           words};
  void *memory = kv_carve(8, sizes, fields);
  if (!memory) return NULL;
  memset(x->q, 0, (size_t)sizes[0] * sizeof *x->q);
  memset(x->buffer, 0, (size_t)sizes[2] * sizeof *x->buffer);
  return memory;
}

/* q [D] as words for keys around a centre: q . k = q . (k - centre) + q . centre. */
static inline void kv_stream_load_words(const kv_stream *x, int64_t r, const float *q, const float *centre) {
  float row[KV_MOST_D], more = 0, sum = 0;
  for (int64_t d = 0; d < x->D; d++) row[d] = q[d];
  for (int64_t d = 0; centre && d < x->D; d++) more += q[d] * centre[d];
  if (kv_is_rotated(x->k_words)) kv_hadamard(row, x->D);
  for (int64_t d = 0; d < x->D; d++) sum += row[d];
  x->q_scale[r] = kv_words_of(row, x->D, (int16_t *)(void *)x->words + r * x->D);
  x->q_sum[r] = sum, x->q_more[r] = more;
}

/* The rows, time-major over the heads of the group as those of kv_rows, for these keys. */
static inline void kv_stream_load(const kv_stream *x, const kv_queries *query, int64_t t0, const kv_columns *k) {
  for (int64_t r = 0; r < x->rows; r++) {
    kv_load_query(query, r % query->G, t0 + r / query->G, x->q + r * x->width);
    if (x->k_words) kv_stream_load_words(x, r, x->q + r * x->width, k->centre);
    kv_stream_order(x, 0, x->q + r * x->width);
  }
}

/* s [G, KEYS], `slots` columns of it, = q [G, width] . k. G and slots are constants at every call. */
KV_INLINE void kv_stream_dots(kv_dtype dtype, int G, int slots, const float *q, kv_stream_rows k, kv_stream_next next,
                              float *s) {
  const int64_t size = kv_size(dtype), whole = k.width / (2 * VL) * (2 * VL);
  vf acc[SHARE][8] = {{{0}}};
  for (int64_t d = 0; d < whole; d += 2 * VL) {
    const int lines = slots * 2 * VL * (dtype == KV_F32 ? 4 : 2) / 64; /* that these numbers fill */
    if (next)
#pragma GCC unroll 16
      for (int i = 0; i < lines; i++) kv_stream_fetch(next, slots * d * size + 64 * i);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      vf y[SHARE];
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        y[g] = vf_load(q + g * k.width + d + half * VL);
        KV_KEEP(y[g]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < slots; i++) {
        const vf x = kv_stream_half(dtype, half, k.x + i * k.stride + d * size);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) acc[g][i] += x * y[g];
      }
    }
  }
  if (whole < k.width)
#pragma GCC unroll 8
    for (int i = 0; i < slots; i++) {
      const vf x = kv_stream_last(dtype, k.x + i * k.stride + whole * size);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g][i] += x * vf_load(q + g * k.width + whole);
    }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++) {
    if (slots == 1) s[g * KEYS] = vf_sum(acc[g][0]);
#pragma GCC unroll 2
    for (int i = 0; i < slots / 4 * 4; i += 4)
      *(v4_any *)(s + g * KEYS + i) = v4_sums(acc[g][i], acc[g][i + 1], acc[g][i + 2], acc[g][i + 3]);
  }
}

/* s [G, KEYS], n columns of it, = q [G, width] . k. */
KV_INLINE void kv_stream_logits_of(kv_dtype dtype, int G, const float *q, kv_stream_rows k, kv_stream_next next,
                                   float *s) {
  const int most = G == 1 ? 8 : 4, apart = G == SHARE ? TOGETHER : G; /* slots and rows at once */
  const int64_t n = k.n;
  for (int64_t c = 0, slots; c < n; c += slots, k.x += slots * k.stride) {
    slots = n - c < most ? 1 : most;
#pragma GCC unroll 2
    for (int g = 0; g < G; g += apart)
      if (slots == most)
        kv_stream_dots(dtype, apart, most, q + g * k.width, k, g ? 0 : next, s + g * KEYS + c);
      else
        kv_stream_dots(dtype, apart, 1, q + g * k.width, k, 0, s + g * KEYS + c);
    if (next) next += (uintptr_t)(slots * k.width * kv_size(dtype));
  }
}

/* o [G, nv * VL] = alpha o + p [G, KEYS] v [n, nv * VL], where rows of o are v.width apart; alpha NULL: 1. */
KV_INLINE void kv_stream_sum(kv_dtype dtype, int G, int nv, const float *p, kv_stream_rows v, kv_stream_next next,
                             const float *alpha, float *o) {
  const int64_t size = kv_size(dtype);
  const int bytes = nv * VL * (dtype == KV_F32 ? 4 : 2);
  vf acc[SHARE][8];
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) acc[g][j] = (alpha ? alpha[g] : 1) * vf_load(o + g * v.width + j * VL);
  for (int64_t c = 0; c < v.n; c++, v.x += v.stride) {
    if (next && (bytes >= 64 || c % (64 / bytes) == 0))
#pragma GCC unroll 8
      for (int at = 0; at < bytes; at += 64) kv_stream_fetch(next, c * bytes + at);
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) {
      const vf x = nv == 1 ? kv_stream_last(dtype, v.x) : kv_stream_half(dtype, j % 2, v.x + j / 2 * 2 * VL * size);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g][j] += p[g * KEYS + c] * x;
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) vf_store(o + g * v.width + j * VL, acc[g][j]);
}

KV_INLINE void kv_stream_values_of(kv_dtype dtype, int G, const float *p, kv_stream_rows v, kv_stream_next next,
                                   const float *alpha, float *o) {
  const int64_t most = G == 1 ? 8 : G == SHARE ? TOGETHER : 4, bytes = VL * kv_size(dtype);
  for (int64_t left = v.width / VL, nv; left > 0; left -= nv, o += nv * VL, v.x += nv * bytes) {
    nv = left >= most ? most : kv_min(left, 2);
    if (nv == most)
      kv_stream_sum(dtype, G, (int)most, p, v, next, alpha, o);
    else if (nv == 2)
      kv_stream_sum(dtype, G, 2, p, v, next, alpha, o);
    else
      kv_stream_sum(dtype, G, 1, p, v, next, alpha, o);
    if (next) next += (uintptr_t)(v.n * nv * bytes);
  }
}

/* How many of `left` rows share loads next: 4 and then 1 would take as long as 4 and 4. */
static inline int64_t kv_stream_share(int64_t left) { return left > SHARE && left < 7 ? 3 : kv_min(left, SHARE); }

#define KV_EACH_SHARE(X, dtype) X(dtype, 1) X(dtype, 2) X(dtype, 3) X(dtype, 4)
#define KV_EACH_TYPE(X) KV_EACH_SHARE(X, KV_F32) KV_EACH_SHARE(X, KV_F16) KV_EACH_SHARE(X, KV_BF16)

static void kv_stream_logits(int64_t G, const float *q, kv_stream_rows k, kv_stream_next next, float *s) {
#define KV_CASE(type, count) \
  if (k.dtype == type && G == count) kv_stream_logits_of(type, count, q, k, next, s);
  KV_EACH_TYPE(KV_CASE)
#undef KV_CASE
}

static void kv_stream_values(int64_t G, const float *p, kv_stream_rows v, kv_stream_next next, const float *alpha,
                             float *o) {
#define KV_CASE(type, count) \
  if (v.dtype == type && G == count) kv_stream_values_of(type, count, p, v, next, alpha, o);
  KV_EACH_TYPE(KV_CASE)
#undef KV_CASE
}

/* The slots c .. c + n - 1 as at most two pieces: in place, or converted into the buffer (its padding stays 0). words:
 * how packed rows are read, else they are converted too; values beside values of 4 bits are rotated as these are. */
static inline int kv_stream_pieces(const kv_stream *x, const kv_columns *columns, kv_packing words, int rotated,
                                   int64_t c, int64_t n, kv_stream_rows *piece) {
  const int64_t size = x->width * (int64_t)sizeof *x->buffer;
  if (!x->in_place && (words == KV_AS_COMPUTED || c >= columns->packed)) {
    for (int64_t i = 0; i < n; i++) {
      kv_column_load(columns, c + i, x->buffer + i * x->width);
      if (rotated) kv_hadamard(x->buffer + i * x->width, x->D);
    }
    piece[0] = (kv_stream_rows){KV_F32, n, x->width, size, (const char *)x->buffer, KV_AS_COMPUTED};
    return 1;
  }
  const kv_run run = kv_columns_run(columns, c, n);
  piece[0] = (kv_stream_rows){x->dtype, run.n, x->width, run.stride, run.x, words};
  if (run.n == n) return 1;
  if (!x->in_place && c + n <= columns->packed) { /* of two buffers: as one, so that weights share a scale */
    char *to = (char *)x->buffer;
    for (int64_t i = 0; i < n; i++) memcpy(to + i * run.stride, kv_column(columns, c + i), (size_t)run.stride);
    piece[0] = (kv_stream_rows){x->dtype, n, x->width, run.stride, to, words};
    return 1;
  }
  if (!x->in_place) return 1 + kv_stream_pieces(x, columns, words, rotated, c + run.n, n - run.n, piece + 1);
  const kv_run rest = kv_columns_run(columns, c + run.n, n - run.n);
  piece[1] = (kv_stream_rows){x->dtype, rest.n, x->width, rest.stride, rest.x, KV_AS_COMPUTED};
  return 2;
}

/* Rows r .. r + G - 1: s [G, KEYS], the columns of a piece, from its keys. */
static inline void kv_stream_keys(const kv_stream *x, int64_t r, int64_t G, kv_stream_rows k, kv_stream_next next,
                                  int64_t next_stride, float *s) {
  if (k.packing == KV_AS_COMPUTED)
    kv_stream_logits(G, x->q + r * x->width, k, next, s);
  else
    kv_words_logits(k.packing, G, (const int16_t *)(const void *)x->words + r * x->D, x->q_scale + r, x->q_sum + r,
                    x->q_more + r, x->D, k.x, k.stride, k.n, next, next_stride, s, KEYS);
}

/* Rows r0 .. r1 - 1, which all see the slots c0 .. c1 - 1, go on: o [rows, width], m [rows], l [rows]. logit: of row
 * 0, rows `apart` apart, or NULL. */
static inline void kv_stream_run(const kv_stream *x, float cap, const kv_columns *k, const kv_columns *v, int64_t c0,
                                 int64_t c1, int64_t r0, int64_t r1, float *o, float *logit, int64_t apart) {
  const int64_t width = x->width;
  float *m = o + x->rows * width, *l = m + x->rows;
  kv_stream_rows piece[2];
  for (int64_t c = c0; c < c1; c += BLOCK) {
    const int64_t n = kv_min(BLOCK, c1 - c), padded = kv_round_up(n, VL);
    int count = kv_stream_pieces(x, k, x->k_words, 0, c, n, piece);
    for (int64_t r = r0, G; r < r1; r += G) {
      G = kv_stream_share(r1 - r);
      for (int64_t i = 0, at = 0; i < count; at += piece[i++].n)
        kv_stream_keys(x, r, G, piece[i], r == r0 ? kv_columns_ahead(v, c + at) : 0, v->at.stored_stride,
                       x->s + r * KEYS + at);
    }
    for (int64_t r = r0; r < r1; r++) {
      float *s = x->s + r * KEYS;
      kv_cap_and_mask(s, cap, n, padded);
      if (logit) memcpy(logit + r * apart + c, s, (size_t)padded * sizeof *s);
      x->alpha[r] = kv_softmax(0, s, padded, m + r, l + r);
    }
    count = kv_stream_pieces(x, v, x->v_words, kv_is_rotated(x->v_words), c, n, piece);
    for (int64_t r = r0, G; r < r1; r += G) {
      G = kv_stream_share(r1 - r);
      for (int64_t i = 0, at = 0; i < count; at += piece[i++].n) {
        const float *s = x->s + r * KEYS + at, *alpha = i ? NULL : x->alpha + r;
        if (piece[i].packing == KV_AS_COMPUTED)
          kv_stream_values(G, s, piece[i], r == r0 ? kv_columns_ahead(k, c + BLOCK + at) : 0, alpha, o + r * width);
        else
          kv_words_values(piece[i].packing, G, s, KEYS, piece[i].x, piece[i].stride, piece[i].n, x->D, alpha,
                          o + r * width);
      }
    }
  }
}

/* Splits of a range of work: for less than about 32k numbers of K, waking a thread costs more than it saves. */
static inline int64_t kv_stream_grain(const kv_stream *x, int64_t slots) {
  return kv_max(1, 32768 / (kv_min(SPLIT, kv_max(slots, 1)) * x->D));
}

/* part: [rows, width + 2] of a split: o, m, l. */
static inline void kv_part_start(float *part, int64_t rows, int64_t width) {
  memset(part, 0, (size_t)(rows * (width + 2)) * sizeof *part);
  for (int64_t r = 0; r < rows; r++) part[rows * width + r] = -INFINITY;
}

static inline float kv_exp2(float x) { return vf_exp2(vf_set1(x))[0]; }

/* m and l of row r over all splits, from part on, and o [width] divided by l unless it is NULL. A sink
 * is one more logit, without a value. */
static inline void kv_part_combine(const float *part, int64_t splits, int64_t rows, int64_t width, int64_t r,
                                   float sink, float *m, float *l, float *o) {
  const int64_t step = rows * (width + 2), at_m = rows * width + r;
  *m = sink;
  for (int64_t i = 0; i < splits; i++)
    if (part[i * step + at_m] > *m) *m = part[i * step + at_m];
  const float at = *m == -INFINITY ? 0 : *m;
  *l = kv_exp2(sink - at);
  for (int64_t d = 0; o && d < width; d++) o[d] = 0;
  for (int64_t i = 0; i < splits; i++, part += step) {
    const float weight = kv_exp2(part[at_m] - at);
    *l += weight * part[at_m + rows];
    for (int64_t d = 0; o && d < width; d++) o[d] += weight * part[r * width + d];
  }
  for (int64_t d = 0; o && d < width; d++) o[d] = *l == 0 ? 0 : o[d] / *l;
}
#endif
