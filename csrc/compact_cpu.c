/* Moves kept slots of [stored | new] together. Neighbours in the index that are neighbours in memory move at once, and
 * what is already in its place stays. */
#include <string.h>

#include "half.h"
#include "parallel.h"

/* `count` rows of `width` bytes, `step` bytes apart, to dense rows at dst. */
static void move_rows(char *dst, const char *src, int64_t count, int64_t step, int64_t width) {
  if (dst == src) return;
  if (step == width) {
    memmove(dst, src, (size_t)(count * width));
    return;
  }
  for (int64_t i = 0; i < count; i++) memcpy(dst + i * width, src + i * step, (size_t)width);
}

/* Alive slots from .. from + run - 1 of one head, all stored or all new, to row `to` of dst. */
static void move_run(const kv_compact *a, int64_t b, int64_t h, int64_t from, int64_t run, int64_t to) {
  const int64_t size = kv_size(a->dtype), width = a->D * size, head = b * a->Hkv + h, len = a->src.len[head];
  const char *k, *v;
  int64_t k_step = width, v_step = width;
  const int32_t *pos;
  if (from < len) {
    const int64_t row = a->src.offset[head] + from;
    k = (const char *)a->src.k + row * width;
    v = (const char *)a->src.v + row * width;
    pos = a->src.pos + row;
  } else {
    const int64_t column = a->fresh.first[b] + from - len;
    const int64_t *ks = a->fresh.k_stride, *vs = a->fresh.v_stride;
    k = (const char *)a->fresh.k + (b * ks[0] + h * ks[1] + column * ks[2]) * size;
    v = (const char *)a->fresh.v + (b * vs[0] + h * vs[1] + column * vs[2]) * size;
    pos = a->fresh.pos + b * a->S + column;
    k_step = ks[2] * size, v_step = vs[2] * size;
  }
  move_rows((char *)a->dst.k + to * width, k, run, k_step, width);
  move_rows((char *)a->dst.v + to * width, v, run, v_step, width);
  move_rows((char *)(a->dst.pos + to), (const char *)pos, run, sizeof *pos, sizeof *pos);
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

kv_status kv_compact_cpu(const kv_compact *a) {
  const kv_status status = kv_compact_check(a, 1);
  if (status != KV_OK) return status;
  int64_t most = 0; /* slots that a head keeps */
  for (int64_t head = 0; head < a->B * a->Hkv; head++)
    if (a->keep[head] > most) most = a->keep[head];
  /* Waking a thread costs as much as moving some 256 KiB. */
  const int64_t bytes = most * a->D * kv_size(a->dtype) * 2;
  kv_parallel_for(a->B * a->Hkv, 1 + 262144 / (bytes + 1), compact_heads, (void *)a);
  return KV_OK;
}
