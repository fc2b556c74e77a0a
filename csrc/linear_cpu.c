/* A few rows x times a matrix of weights on a CPU. It is limited by memory bandwidth: each weight is read once, in
 * place, where a library for many rows would pack the weights first. Rows are multiplied with weights as stream.h
 * multiplies queries with keys. In Intel's tile registers the weights are the first operand, read in place, and 16 or
 * 32 packed rows of x are the second. */
#include "stream.h"

enum { OUTPUTS = 64 /* the most outputs of a task: the slots of a BLOCK, or the rows of four tile registers */ };

typedef struct {
  const kv_linear *a;
  kv_stream rows; /* x as queries; unused with tile registers */
  int64_t group;  /* rows of x that are in tile registers at once: 16 or 32 */
  float *packed;  /* [ceil(rows / group), K / 2, group] words of x, then zeros; NULL without tile registers */
  int64_t block;  /* number of outputs of a task */
} kv_linear_job;

static const char *kv_linear_row(const kv_linear *a, int64_t r) {
  return (const char *)a->x + (r / a->T * a->x_stride[0] + r % a->T * a->x_stride[1]) * kv_size(a->dtype);
}

static void kv_linear_load(kv_stream *x, const kv_linear *a) {
  for (int64_t r = 0; r < x->rows; r++) {
    if (x->k_form == KV_BY_BF16) {
      memcpy(x->words + r * a->K / 2, kv_linear_row(a, r), (size_t)a->K * 2);
      x->by[r] = 1, x->more[r] = 0;
    } else {
      kv_load_row(a->dtype, kv_linear_row(a, r), x->q + r * x->width, a->K);
      kv_stream_order(x, 0, x->q + r * x->width);
    }
  }
}

static float *kv_linear_pack(const kv_linear *a, int64_t group) {
  const int64_t rows = a->B * a->T, words = a->K / 2;
  const size_t bytes = (size_t)(kv_round_up(rows, group) * words) * 4;
  float *packed = aligned_alloc(64, bytes + 64);
  if (!packed) return NULL;
  memset(packed, 0, bytes);
  for (int64_t r = 0; r < rows; r++) {
    const char *row = kv_linear_row(a, r);
    float *to = packed + r / group * group * words + r % group;
    for (int64_t w = 0; w < words; w++) memcpy(to + w * group, row + 4 * w, sizeof *to);
  }
  return packed;
}

/* Stores y [n] + bias as outputs n0 .. n0 + n - 1 of row r. */
static void kv_linear_store(const kv_linear *a, int64_t r, int64_t n0, int64_t n, float *y) {
  const int64_t size = kv_size(a->dtype);
  if (a->bias) {
    float bias[OUTPUTS];
    kv_load_row(a->dtype, (const char *)a->bias + n0 * size, bias, n);
    for (int64_t i = 0; i < n; i++) y[i] += bias[i];
  }
  kv_store_row(a->dtype, y, (char *)a->out + (r * a->N + n0) * size, n);
}

/* Computes outputs n0 .. n0 + n - 1 of all rows in tile registers. It multiplies 64 outputs' weights at once: at the
 * matrix's end these begin before n0. */
static void kv_linear_tiles(const kv_linear_job *job, int64_t n0, int64_t n) {
  const kv_linear *a = job->a;
  const int64_t rows = a->B * a->T, group = job->group, from = kv_min(n0, a->N - OUTPUTS), words = a->K / 2;
  const float *weight = (const float *)a->weight + from * words;
  float c[OUTPUTS * 2 * SQUARE], y[OUTPUTS];
  for (int64_t r0 = 0; r0 < rows; r0 += group) {
    const float *x = job->packed + r0 * words;
    if (group == SQUARE)
      kv_amx_column(weight, words, x, c);
    else
      kv_amx_multiply(0, OUTPUTS, group, weight, words, x, group, words, c, group);
    for (int64_t r = r0; r < kv_min(rows, r0 + group); r++) {
      for (int64_t i = 0; i < n; i++) y[i] = c[(n0 - from + i) * group + r - r0];
      kv_linear_store(a, r, n0, n, y);
    }
  }
}

static void kv_linear_stream(const kv_linear_job *job, int64_t n0, int64_t n) {
  const kv_linear *a = job->a;
  const kv_stream *x = &job->rows;
  const int64_t stride = a->K * kv_size(a->dtype), vectors = a->K / (kv_is_words(x->k_form) ? WORDS : VL);
  const char *weight = (const char *)a->weight + n0 * stride;
  const kv_stream_rows piece = {x->k_form, n, vectors, stride, weight};
  float y[SHARE * KEYS] = {0};
  for (int64_t r = 0, G; r < x->rows; r += G) {
    G = kv_stream_share(x->rows - r);
    kv_stream_keys(x, r, G, &piece, r ? 0 : (kv_stream_next)(weight + n * stride), y);
    for (int64_t g = 0; g < G; g++) kv_linear_store(a, r + g, n0, n, y + g * KEYS);
  }
}

static void kv_linear_body(void *ctx, int64_t begin, int64_t end) {
  const kv_linear_job *job = ctx;
  const kv_amx before = kv_tiles_begin(job->packed != NULL);
  for (int64_t n0 = begin * job->block; n0 < kv_min(end * job->block, job->a->N); n0 += job->block)
    (job->packed ? kv_linear_tiles : kv_linear_stream)(job, n0, kv_min(job->block, job->a->N - n0));
  kv_tiles_end(job->packed != NULL, before);
}

kv_status KV_OP(linear)(const kv_linear *a) {
  /* near: the number of outputs whose weights take 64 KiB. */
  const int64_t rows = a->B * a->T, near = 65536 / kv_max(1, a->K * kv_size(a->dtype));
  if (rows == 0 || a->N == 0) return KV_OK;
  const int tiles = KV_AMX && a->dtype == KV_BF16 && a->N >= OUTPUTS;
  const kv_slots none = {0};
  const int64_t group = rows > SQUARE ? 2 * SQUARE : SQUARE;
  kv_linear_job job = {a, kv_stream_of(a->dtype, a->K, rows, &none), group, NULL, OUTPUTS};
  void *memory = NULL;
  if (tiles) {
    memory = job.packed = kv_linear_pack(a, group);
  } else {
    job.block = kv_min(OUTPUTS, kv_max(8, near / 8 * 8));
    memory = kv_stream_alloc(&job.rows);
    if (memory) kv_linear_load(&job.rows, a);
  }
  if (!memory) return KV_NO_MEMORY;
  const int64_t tasks = (a->N + job.block - 1) / job.block;
  kv_parallel_for(tasks, kv_max(1, 32768 / (job.block * kv_max(1, a->K))), kv_linear_body, &job);
  free(memory);
  return KV_OK;
}
