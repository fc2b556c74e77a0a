/* Moves the kept slots of [stored | new] together on a CPU. Slots that are neighbours in the index and in memory move
 * in one copy; slots that are already in place are not touched. */
#include "columns.h"
#include "parallel.h"
#include "simd.h"

/* Copies `count` rows of `width` bytes, `step` bytes apart, to dense rows at dst. */
static void move_rows(char *dst, const char *src, int64_t count, int64_t step, int64_t width) {
  if (dst == src) return;
  if (step == width) {
    memmove(dst, src, (size_t)(count * width));
    return;
  }
  for (int64_t i = 0; i < count; i++) memcpy(dst + i * width, src + i * step, (size_t)width);
}

/* Copies slots from .. from + run - 1 of one head's keys or values, which must be all stored or all new, to rows to ..
 * to + run - 1 of dst. Rows are packed if only dst is packed, and unpacked if only the source is. */
static void move_slots(const kv_columns *src, int64_t from, int64_t run, char *dst, int64_t to, kv_kind kind,
                       const float *centre) {
  const int64_t width = kv_row_bytes(kind, src->dtype, src->D);
  const kv_run rows = kv_columns_run(src, from, run);
  dst += to * width;
  if ((kind == KV_AS_COMPUTED) == (from >= src->packed))
    move_rows(dst, rows.x, run, rows.stride, width);
  else if (kind != KV_AS_COMPUTED)
    for (int64_t i = 0; i < run; i++)
      kv_row_store(src->dtype, src->D, rows.x + i * rows.stride, kind, centre, dst + i * width);
  else
    for (int64_t i = 0; i < run; i++) {
      float numbers[KV_MOST_D];
      kv_column_load(src, from + i, numbers);
      kv_store_row(src->dtype, numbers, dst + i * width, src->D);
    }
}

static void move_run(const kv_compact *a, int64_t b, int64_t h, int64_t from, int64_t run, int64_t to) {
  const kv_columns k = kv_head_columns(KV_KEYS, a->dtype, a->D, &a->src, &a->chunk, b, h, a->Hkv, a->S);
  const kv_columns v = kv_head_columns(KV_VALUES, a->dtype, a->D, &a->src, &a->chunk, b, h, a->Hkv, a->S);
  const kv_segments pos = kv_positions_of(&a->src, &a->chunk, b, h, a->Hkv, a->S);
  const int64_t width = sizeof *a->dst.pos;
  move_slots(&k, from, run, a->dst.k, to, a->dst.k_kind, kv_centre(&a->dst, b * a->Hkv + h, a->D));
  move_slots(&v, from, run, a->dst.v, to, a->dst.v_kind, NULL);
  move_rows((char *)(a->dst.pos + to), (const char *)(uintptr_t)kv_segments_at(&pos, from), run, width, width);
}

static void compact_heads(void *ctx, int64_t begin, int64_t end) {
  const kv_compact *a = ctx;
  for (int64_t head = begin; head < end; head++) {
    const int64_t len = a->src.len[head], keep = a->keep[head], to = a->dst.offset[head];
    const int32_t *index = a->index ? a->index + head * a->K : NULL;
    int64_t run;
    for (int64_t j = 0; j < keep; j += run) {
      const int64_t from = index ? index[j] : j;
      for (run = 1; j + run < keep && from + run != len; run++)
        if (index && index[j + run] != from + run) break;
      move_run(a, head / a->Hkv, head % a->Hkv, from, run, to + j);
    }
  }
}

kv_status KV_OP(compact)(const kv_compact *a) {
  int64_t most = 0; /* the most slots that a head keeps */
  for (int64_t head = 0; head < a->B * a->Hkv; head++)
    if (a->keep[head] > most) most = a->keep[head];
  /* A thread gets heads with about 256 KiB or more: waking it costs as much as moving 256 KiB. */
  const int64_t bytes = most * a->D * kv_size(a->dtype) * 2;
  kv_parallel_for(a->B * a->Hkv, 1 + 262144 / (bytes + 1), compact_heads, (void *)a);
  return KV_OK;
}
