/* Norms of the alive slots' keys or values on a CPU. The op is limited by memory bandwidth. */
#include "tile.h"

enum { SPLIT = 256 }; /* number of columns of a task */

static void kv_norm_body(void *ctx, int64_t begin, int64_t end) {
  const kv_norm *a = ctx;
  const int64_t splits = (a->C + SPLIT - 1) / SPLIT;
  float row[KV_MOST_D];
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i / splits, b = at / a->Hkv, c0 = i % splits * SPLIT;
    const kv_columns x =
        kv_head_columns(KV_KEYS, a->dtype, a->D, &a->slots, &a->chunk, b, at % a->Hkv, a->Hkv, a->stop[b]);
    for (int64_t c = c0; c < kv_min(c0 + SPLIT, a->C); c++)
      a->out[at * a->C + c] = c < x.n ? kv_norm_of(kv_column_floats(&x, c, row), a->D, a->p) : 0;
  }
}

kv_status KV_OP(norm)(const kv_norm *a) {
  const int64_t splits = (a->C + SPLIT - 1) / SPLIT;
  kv_parallel_for(a->B * a->Hkv * splits, kv_max(1, 32768 / (SPLIT * a->D)), kv_norm_body, (void *)a);
  return KV_OK;
}
