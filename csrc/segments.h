/* The addresses of the alive slots [stored | new] of one (b, kv head), for C11 and CUDA; computed nowhere else. */
#ifndef KVEVICT_SEGMENTS_H
#define KVEVICT_SEGMENTS_H
#include "kvevict.h"

#ifdef __cplusplus
#define KV_ADDRESSING static __device__ __forceinline__
typedef int32_t kv_span; /* 32 bits, since a GPU's registers are scarce; tensors.h refuses larger strides */
typedef uint32_t kv_unsigned;
#else
#define KV_ADDRESSING static inline
typedef int64_t kv_span;
typedef uint64_t kv_unsigned;
#endif

/* Slot i is stored row i if i < len, else a new row. The address of a slot that does not exist is never read. */
typedef struct {
  uint64_t stored, chunk;              /* addresses that slot 0 would have among stored rows and in the chunk */
  kv_span stored_stride, chunk_stride; /* in bytes */
  kv_span len, n;                      /* n slots, len of them stored */
} kv_segments;

KV_ADDRESSING uint64_t kv_segments_at(const kv_segments *x, kv_span i) {
  const kv_unsigned stride = (kv_unsigned)(i < x->len ? x->stored_stride : x->chunk_stride);
  return (i < x->len ? x->stored : x->chunk) + (uint64_t)(kv_unsigned)i * stride;
}

/* Returns the addresses of one head's slots. rows: the layer's [rows, D], in which row `offset` is slot 0; chunk: [B,
 * Hkv, S, D] with strides of b, h and s in elements, of which new keys first .. stop - 1 are alive; size: bytes of an
 * element. An empty chunk may have any address and strides, so it gets address 0 and stride 0: copies of 0 bytes may
 * name these. */
KV_ADDRESSING kv_segments kv_segments_of(const void *rows, int64_t offset, int64_t len, const void *chunk,
                                         const int64_t *stride, int64_t b, int64_t h, int64_t first, int64_t stop,
                                         int64_t D, int64_t size) {
  const int64_t at = b * stride[0] + h * stride[1] + (first - len) * stride[2];
  const int none = stop <= first;
  const kv_segments x = {(uint64_t)rows + (uint64_t)(offset * D * size),
                         none ? 0 : (uint64_t)chunk + (uint64_t)(at * size),
                         (kv_span)(D * size),
                         none ? 0 : (kv_span)(stride[2] * size),
                         (kv_span)len,
                         (kv_span)(len + stop - first)};
  return x;
}

typedef enum { KV_KEYS, KV_VALUES } kv_side;

/* kv_rows_of returns the addresses of the keys or values of kv head h of batch row b, kv_positions_of those of their
 * positions. */
KV_ADDRESSING kv_segments kv_rows_of(kv_side side, const kv_slots *slots, const kv_new *chunk, int64_t b, int64_t h,
                                     int64_t Hkv, int64_t stop, int64_t D, int64_t size) {
  const int64_t head = b * Hkv + h;
  return kv_segments_of(side == KV_KEYS ? slots->k : slots->v, slots->offset[head], slots->len[head],
                        side == KV_KEYS ? chunk->k : chunk->v, side == KV_KEYS ? chunk->k_stride : chunk->v_stride, b,
                        h, chunk->first[b], stop, D, size);
}
KV_ADDRESSING kv_segments kv_positions_of(const kv_slots *slots, const kv_new *chunk, int64_t b, int64_t h, int64_t Hkv,
                                          int64_t S) {
  const int64_t head = b * Hkv + h, stride[3] = {S, 0, 1};
  return kv_segments_of(slots->pos, slots->offset[head], slots->len[head], chunk->pos, stride, b, h, chunk->first[b], S,
                        1, sizeof *slots->pos);
}
#endif
