/* Norms of the alive keys or values on a CPU: bound by reading them. */
#include "tile.h"

kv_status KV_OP(norm)(const kv_norm *a);

enum { STRETCH = 256 }; /* columns of a task */

static void kv_norm_body(void *ctx, int64_t begin, int64_t end) {
  const kv_norm *a = ctx;
  const int64_t stretches = (a->C + STRETCH - 1) / STRETCH;
  float row[256];
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i / stretches, b = at / a->Hkv, c0 = i % stretches * STRETCH;
    const kv_columns x = kv_columns_of(a->dtype, a->D, a->slots.k, a->slots.offset[at], a->slots.len[at], a->fresh.k,
                                       a->fresh.k_stride, b, at % a->Hkv, a->fresh.first[b], a->stop[b]);
    for (int64_t c = c0; c < kv_min(c0 + STRETCH, a->C); c++)
      a->out[at * a->C + c] = c < x.n ? kv_norm_of(kv_column_floats(&x, c, row), a->D, a->p) : 0;
  }
}

kv_status KV_OP(norm)(const kv_norm *a) {
  const int64_t stretches = (a->C + STRETCH - 1) / STRETCH;
  kv_parallel_for(a->B * a->Hkv * stretches, kv_max(1, 32768 / (STRETCH * a->D)), kv_norm_body, (void *)a);
  return KV_OK;
}
