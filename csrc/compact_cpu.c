/* Moves the kept slots of [stored | new] together on a CPU. Neighbours in the index that are neighbours in memory move
 * at once; slots already in place are not touched. */
#include "half.h"
#include "parallel.h"
#include "segments.h"
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

/* Copies alive slots from .. from + run - 1 of one head, all stored or all new, to row `to` of dst. */
static void move_run(const kv_compact *a, int64_t b, int64_t h, int64_t from, int64_t run, int64_t to) {
  const int64_t size = kv_size(a->dtype);
  const kv_segments all[] = {kv_keys_of(&a->src, &a->chunk, b, h, a->Hkv, a->S, a->D, size),
                             kv_values_of(&a->src, &a->chunk, b, h, a->Hkv, a->S, a->D, size),
                             kv_positions_of(&a->src, &a->chunk, b, h, a->Hkv, a->S)};
  char *const dst[] = {a->dst.k, a->dst.v, (char *)a->dst.pos};
  for (int i = 0; i < 3; i++) {
    const int64_t width = all[i].stored_stride, step = from < all[i].len ? width : all[i].chunk_stride;
    move_rows(dst[i] + to * width, (const char *)(uintptr_t)kv_segments_at(&all[i], from), run, step, width);
  }
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
  int64_t most = 0; /* slots that one head keeps */
  for (int64_t head = 0; head < a->B * a->Hkv; head++)
    if (a->keep[head] > most) most = a->keep[head];
  /* Waking a thread costs as much as moving some 256 KiB. */
  const int64_t bytes = most * a->D * kv_size(a->dtype) * 2;
  kv_parallel_for(a->B * a->Hkv, 1 + 262144 / (bytes + 1), compact_heads, (void *)a);
  return KV_OK;
}
