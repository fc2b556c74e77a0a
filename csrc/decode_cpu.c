/* One decode step on a CPU. Limited by memory bandwidth, so each row is read once, in place, for the G heads of its
 * group. The slots of a head are cut into splits that do not depend on the number of threads: pass 1 writes the new row
 * and computes m, l and o of each split; pass 2 combines the splits in order and, if asked, turns the stored logits
 * into probs. */
#include <stdatomic.h>

#include "tile.h"

enum {
  SPLIT = 512, /* slots of a split */
  BLOCK = 64,  /* slots of a block, which fits the first-level cache */
  HEADS = 4,   /* heads that share a load */
  AHEAD = 8,   /* slots between the key that is read and the one that is prefetched */
};

typedef struct {
  const kv_decode *a;
  int64_t width, rows;  /* D rounded up to whole vectors, G to a multiple of HEADS */
  int64_t splits, most; /* splits of the longest head, its slots rounded up to whole vectors */
  float *part;          /* [B, Hkv, splits, rows, width + 2]: o, m, l */
  float *logit;         /* [B, Hkv, G, most] in log2 units, or NULL */
  atomic_int failed;
} kv_decode_job;

/* n rows of `width` numbers: in place if D is `width`, else converted into buffer [BLOCK, width], whose padding stays
 * 0. */
typedef struct {
  kv_dtype dtype;
  int64_t n, width;
  const char *x;
} kv_decode_rows;

static kv_decode_rows kv_decode_rows_of(const kv_columns *x, int64_t c0, int64_t n, int64_t width, float *buffer) {
  if (x->D == width) return (kv_decode_rows){x->dtype, n, width, kv_column(x, c0)};
  for (int64_t c = 0; c < n; c++) kv_load_row(x->dtype, kv_column(x, c0 + c), buffer + c * width, x->D);
  return (kv_decode_rows){KV_F32, n, width, (const char *)buffer};
}

/* As kv_float_of_f16 and kv_float_of_bf16, but a product makes denormals normal. */
KV_INLINE vf kv_decode_load(kv_dtype dtype, const void *x) {
  if (dtype == KV_F32) return vf_load(x);
  const vu u = vu_of_16bit(x);
  if (dtype == KV_BF16) return (vf)(u << 16);
  const vu magnitude = (u & 0x7fff) << 13, special = (vu)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
  return (vf)((vu)((vf)magnitude * 0x1p112f) | special | (u & 0x8000) << 16);
}

/* s [HEADS, KEYS] = q [HEADS, width] . k [n, width]. Prefetches later keys and, into the second-level cache, the values
 * [n, bytes] of these slots, since the hardware prefetches too little of both. The last prefetches name addresses past
 * the slots: a prefetch never faults, and a bound would cost an instruction per line. They are integers because no
 * pointer may leave its array. */
KV_INLINE void kv_decode_dots(kv_dtype dtype, const float *q, kv_decode_rows k, const char *values, int64_t bytes,
                              float *s) {
  const int64_t size = kv_size(dtype);
  for (int64_t c = 0; c < k.n; c++, k.x += k.width * size, values += bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(values + i, 0, 2);
      __builtin_prefetch((const void *)((uintptr_t)k.x + (uintptr_t)(AHEAD * bytes + i)));
    }
    vf acc[HEADS] = {{0}};
    for (int64_t d = 0; d < k.width; d += VL) {
      const vf x = kv_decode_load(dtype, k.x + d * size);
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) acc[g] += x * vf_load(q + g * k.width + d);
    }
    const v4 sums = v4_sums(acc[0], acc[1], acc[2], acc[3]);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) s[g * KEYS + c] = sums[g];
  }
}

/* o [HEADS, nv * VL] = alpha o + p [HEADS, KEYS] v [n, nv * VL], where rows of v and o are `width` apart. */
KV_INLINE void kv_decode_sum(kv_dtype dtype, int nv, const float *p, kv_decode_rows v, const float *alpha, float *o) {
  const int64_t size = kv_size(dtype);
  vf acc[HEADS][NV];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) acc[g][j] = alpha[g] * vf_load(o + g * v.width + j * VL);
  for (int64_t c = 0; c < v.n; c++, v.x += v.width * size) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      const vf x = kv_decode_load(dtype, v.x + j * VL * size);
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) acc[g][j] += p[g * KEYS + c] * x;
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) vf_store(o + g * v.width + j * VL, acc[g][j]);
}

KV_INLINE void kv_decode_sums(kv_dtype dtype, const float *p, kv_decode_rows v, const float *alpha, float *o) {
  for (int64_t left = v.width / VL, nv; left > 0; left -= nv, o += nv * VL, v.x += nv * VL * kv_size(dtype)) {
    nv = left < NV ? 1 : NV;
    if (nv == NV)
      kv_decode_sum(dtype, NV, p, v, alpha, o);
    else
      kv_decode_sum(dtype, 1, p, v, alpha, o);
  }
}

static void kv_decode_logits(const float *q, kv_decode_rows k, const char *values, int64_t bytes, float *s) {
  if (k.dtype == KV_F32) kv_decode_dots(KV_F32, q, k, values, bytes, s);
  if (k.dtype == KV_F16) kv_decode_dots(KV_F16, q, k, values, bytes, s);
  if (k.dtype == KV_BF16) kv_decode_dots(KV_BF16, q, k, values, bytes, s);
}

static void kv_decode_values(const float *p, kv_decode_rows v, const float *alpha, float *o) {
  if (v.dtype == KV_F32) kv_decode_sums(KV_F32, p, v, alpha, o);
  if (v.dtype == KV_F16) kv_decode_sums(KV_F16, p, v, alpha, o);
  if (v.dtype == KV_BF16) kv_decode_sums(KV_BF16, p, v, alpha, o);
}

static void kv_decode_append(const kv_decode *a, int64_t b, int64_t h, int64_t row) {
  const int64_t size = kv_size(a->dtype), bytes = a->D * size;
  const int64_t *ks = a->chunk.k_stride, *vs = a->chunk.v_stride;
  memcpy((char *)a->slots.k + row * bytes, (const char *)a->chunk.k + (b * ks[0] + h * ks[1]) * size, (size_t)bytes);
  memcpy((char *)a->slots.v + row * bytes, (const char *)a->chunk.v + (b * vs[0] + h * vs[1]) * size, (size_t)bytes);
  a->slots.pos[row] = a->chunk.pos[b];
}

typedef struct {
  float *q, *s, *alpha, *buffer; /* [rows, width] scaled, [rows, KEYS], [rows], [BLOCK, width] */
} kv_decode_scratch;

/* Slots c0 .. c1 - 1 of one head -> o [rows, width], m [rows], l [rows] */
static void kv_decode_split(const kv_decode_job *job, const kv_decode_scratch *x, const kv_queries *query,
                            const kv_columns *k, const kv_columns *v, int64_t c0, int64_t c1, float *o, float *logit) {
  const int64_t width = job->width, G = query->G;
  float *m = o + job->rows * width, *l = m + job->rows;
  memset(o, 0, (size_t)(job->rows * (width + 2)) * sizeof *o);
  for (int64_t g = 0; g < G; g++) m[g] = -INFINITY;
  for (int64_t c = c0; c < c1; c += BLOCK) {
    const int64_t n = kv_min(BLOCK, c1 - c), padded = kv_round_up(n, VL);
    const kv_decode_rows keys = kv_decode_rows_of(k, c, n, width, x->buffer);
    for (int64_t g = 0; g < G; g += HEADS)
      kv_decode_logits(x->q + g * width, keys, kv_column(v, c), v->D * kv_size(v->dtype), x->s + g * KEYS);
    for (int64_t g = 0; g < G; g++) {
      float *s = x->s + g * KEYS;
      kv_cap_and_mask(s, query->cap, n, padded);
      if (logit) memcpy(logit + g * job->most + c, s, (size_t)padded * sizeof *s);
      x->alpha[g] = kv_softmax(0, s, padded, m + g, l + g);
    }
    const kv_decode_rows values = kv_decode_rows_of(v, c, n, width, x->buffer);
    for (int64_t g = 0; g < G; g += HEADS) kv_decode_values(x->s + g * KEYS, values, x->alpha + g, o + g * width);
  }
}

static void kv_decode_task(const kv_decode_job *job, const kv_decode_scratch *x, int64_t b, int64_t h, int64_t split) {
  const kv_decode *a = job->a;
  const int64_t G = a->H / a->Hkv, at = b * a->Hkv + h, offset = a->slots.offset[at], n = a->slots.len[at] + 1;
  const int64_t c0 = split * SPLIT, c1 = kv_min(n, c0 + SPLIT);
  if (c0 >= n) return;
  if (c1 == n) kv_decode_append(a, b, h, offset + n - 1);
  const kv_queries query = kv_queries_of(a->dtype, a->D, G, a->q, a->q_stride, b, h, a->scale, a->softcap);
  const int64_t none[3] = {0}, size = kv_size(a->dtype); /* the new row is already stored */
  const kv_columns k = {a->dtype, a->D, kv_segments_of(a->slots.k, offset, n, NULL, none, b, h, 0, 0, a->D, size)};
  const kv_columns v = {a->dtype, a->D, kv_segments_of(a->slots.v, offset, n, NULL, none, b, h, 0, 0, a->D, size)};
  for (int64_t g = 0; g < G; g++) kv_load_query(&query, g, 0, x->q + g * job->width);
  kv_decode_split(job, x, &query, &k, &v, c0, c1, job->part + (at * job->splits + split) * job->rows * (job->width + 2),
                  job->logit ? job->logit + at * G * job->most : NULL);
}

/* Scratch starts as 0: the padding of q and buffer, and rows of q from G on, whose products are not used. */
static void kv_decode_body(void *ctx, int64_t begin, int64_t end) {
  kv_decode_job *job = ctx;
  const kv_decode *a = job->a;
  kv_decode_scratch x;
  x.q = calloc((size_t)(job->rows * (job->width + KEYS + 1) + BLOCK * job->width), sizeof *x.q);
  if (!x.q) {
    job->failed = 1;
    return;
  }
  x.s = x.q + job->rows * job->width;
  x.alpha = x.s + job->rows * KEYS;
  x.buffer = x.alpha + job->rows;
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i / job->splits;
    kv_decode_task(job, &x, at / a->Hkv, at % a->Hkv, i % job->splits);
  }
  free(x.q);
}

static float kv_exp2(float x) { return vf_exp2(vf_set1(x))[0]; }

/* m and l of head g over all splits, the first of which is at part, and out unless it is NULL. */
static void kv_decode_combine(const kv_decode_job *job, const float *part, int64_t splits, int64_t g, float sink,
                              float *m, float *l, void *out) {
  const int64_t width = job->width, rows = job->rows, step = rows * (width + 2), at_m = rows * width + g;
  float o[KV_MOST_D] = {0};
  *m = sink;
  for (int64_t i = 0; i < splits; i++)
    if (part[i * step + at_m] > *m) *m = part[i * step + at_m];
  const float at = *m == -INFINITY ? 0 : *m;
  *l = kv_exp2(sink - at);
  for (int64_t i = 0; i < splits; i++, part += step) {
    const float weight = kv_exp2(part[at_m] - at);
    *l += weight * part[at_m + rows];
    for (int64_t d = 0; d < width; d++) o[d] += weight * part[g * width + d];
  }
  for (int64_t d = 0; d < width; d++) o[d] = *l == 0 ? 0 : o[d] / *l;
  if (out) kv_store_row(job->a->dtype, o, out, job->a->D);
}

/* Pass 2: probs of the columns of one split of one head. Split 0 also writes out, lse and the zeros. */
static void kv_decode_finish(const kv_decode_job *job, int64_t b, int64_t h, int64_t split) {
  const kv_decode *a = job->a;
  const int64_t G = a->H / a->Hkv, at = b * a->Hkv + h, n = a->slots.len[at] + 1, size = kv_size(a->dtype);
  const int64_t c0 = split * SPLIT, columns = kv_min(n - c0, SPLIT);
  const float *part = job->part + at * job->splits * job->rows * (job->width + 2);
  float p[SPLIT] = {0};
  if (columns <= 0) return;
  for (int64_t g = 0; g < G; g++) {
    const int64_t head = b * a->H + h * G + g;
    const float sink = a->sinks ? a->sinks[h * G + g] * KV_LOG2E : -INFINITY;
    void *out = split == 0 ? (char *)a->out + head * a->D * size : NULL;
    float m, l;
    kv_decode_combine(job, part, (n + SPLIT - 1) / SPLIT, g, sink, &m, &l, out);
    const float lse = m + log2f(l), from = lse == -INFINITY ? 0 : lse;
    if (split == 0) a->lse[head] = KV_LN2 * lse;
    for (int64_t c = 0; a->probs && c < columns; c += VL)
      vf_store(p + c, vf_load(p + c) + vf_exp2(vf_load(job->logit + (at * G + g) * job->most + c0 + c) - from));
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
  for (int64_t i = 0; i < heads; i++) most = kv_max(most, kv_round_up(a->slots.len[i] + 1, VL));
  kv_decode_job job = {a, kv_round_up(a->D, VL), kv_round_up(G, HEADS), (most + SPLIT - 1) / SPLIT, most, NULL, NULL,
                       0};
  const int64_t floats = heads * job.splits * job.rows * (job.width + 2), task = kv_min(SPLIT, most) * a->D;
  job.part = malloc((size_t)floats * sizeof *job.part);
  if (a->probs) job.logit = malloc((size_t)(heads * G * most) * sizeof *job.logit);
  job.failed = !job.part || (a->probs && !job.logit);
  /* For less than about 32k numbers of K, waking a thread costs more than it saves. */
  if (!job.failed) kv_parallel_for(heads * job.splits, kv_max(1, 32768 / task), kv_decode_body, &job);
  if (!job.failed)
    kv_parallel_for(heads * (a->probs ? job.splits : 1), kv_max(1, 524288 / task), kv_decode_finish_body, &job);
  free(job.part);
  free(job.logit);
  return job.failed ? KV_NO_MEMORY : KV_OK;
}
