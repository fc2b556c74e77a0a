/* Quadratic forms of the alive keys or values on a CPU: x_i . (A x_i + b) for every slot i and query head.
 *
 * A task packs a block of one kv head's slots once. For each head of the group it multiplies the block with the rows of
 * that head's A, a tile of rows at a time. A is fp32, so slots are multiplied as fp32 whatever their dtype. Rows of A
 * are summed in ascending order. */
#include <stdatomic.h>

#include "tile.h"

typedef struct {
  const kv_quadratic *a;
  atomic_int failed;
} kv_quadratic_job;

typedef struct {
  float *x, *row;    /* a packed block of slots x; [VL, D] scratch of packing */
  float *matrix, *y; /* [TILE, D] rows of A, [TILE, KEYS] their products with the slots */
  float total[KEYS];
} kv_quadratic_task;

/* Adds x[r] (y[r] + b[r]) of rows r0 .. r0 + rows - 1 of A to total [columns], with y = A x. */
static void kv_quadratic_add(kv_quadratic_task *f, int64_t r0, int64_t rows, int64_t D, int64_t columns,
                             const float *linear) {
  for (int64_t c = 0; c < columns; c += VL) {
    const float *x = f->x + c / PANEL * PANEL * D + c % PANEL;
    vf acc = vf_load(f->total + c);
    for (int64_t r = 0; r < rows; r++)
      acc += vf_load(x + (r0 + r) * PANEL) * (vf_load(f->y + r * KEYS + c) + (linear ? linear[r0 + r] : 0));
    vf_store(f->total + c, acc);
  }
}

/* Computes out [columns] of query head h of batch row b for the packed block of slots. */
static void kv_quadratic_head(const kv_quadratic *a, kv_quadratic_task *f, int64_t b, int64_t h, int64_t columns,
                              float *out) {
  const kv_queries rows_of = {.dtype = KV_F32, .D = a->D, .words = a->D, .scale = 1};
  const float *matrix = a->matrix + b * a->matrix_stride[0] + h * a->matrix_stride[1];
  const float *linear = a->linear ? a->linear + b * a->linear_stride[0] + h * a->linear_stride[1] : NULL;
  memset(f->total, 0, sizeof f->total);
  for (int64_t r0 = 0; r0 < a->D; r0 += TILE) {
    const int64_t rows = kv_min(TILE, a->D - r0), padded = kv_round_up(rows, MR);
    for (int64_t r = 0; r < rows; r++)
      memcpy(f->matrix + r * a->D, matrix + (r0 + r) * a->matrix_stride[2], (size_t)a->D * sizeof *matrix);
    memset(f->matrix + rows * a->D, 0, (size_t)((padded - rows) * a->D) * sizeof *matrix);
    kv_tile_s(&rows_of, f->matrix, padded, f->x, columns, f->y);
    kv_quadratic_add(f, r0, rows, a->D, columns, linear);
  }
  memcpy(out, f->total, (size_t)columns * sizeof *out);
}

static void kv_quadratic_body(void *ctx, int64_t begin, int64_t end) {
  kv_quadratic_job *job = ctx;
  const kv_quadratic *a = job->a;
  const int64_t G = a->H / a->Hkv, block = kv_block(a->D), blocks = (a->C + block - 1) / block;
  kv_quadratic_task f;
  const int64_t sizes[] = {block * a->D, VL * a->D, TILE * a->D, TILE * KEYS};
  float **const fields[] = {&f.x, &f.row, &f.matrix, &f.y};
  void *memory = kv_carve(4, sizes, fields);
  if (!memory) job->failed = 1;
  for (int64_t i = begin; memory && i < end; i++) {
    const int64_t at = i / blocks, b = at / a->Hkv, c0 = i % blocks * block, most = kv_min(block, a->C - c0);
    const kv_columns x =
        kv_head_columns(KV_KEYS, a->dtype, a->D, &a->slots, &a->chunk, b, at % a->Hkv, a->Hkv, a->stop[b]);
    const int64_t columns = kv_min(kv_max(x.n - c0, 0), most);
    kv_pack_k(&x, 0, c0, columns, f.x, f.row);
    for (int64_t g = 0; g < G; g++) {
      float *out = a->out + (at * G + g) * a->C + c0;
      kv_quadratic_head(a, &f, b, at % a->Hkv * G + g, columns, out);
      for (int64_t c = columns; c < most; c++) out[c] = 0;
    }
  }
  free(memory);
}

kv_status KV_OP(quadratic)(const kv_quadratic *a) {
  const int64_t block = kv_block(a->D), blocks = (a->C + block - 1) / block;
  kv_quadratic_job job = {a, 0};
  if (a->H > 0) kv_parallel_for(a->B * a->Hkv * blocks, 1, kv_quadratic_body, &job);
  return job.failed ? KV_NO_MEMORY : KV_OK;
}
