/* Selects the slots to keep on a CPU. Scores become 32-bit integer keys of the same order. Three histograms, each of 11
 * bits of the keys, find in O(n) the smallest key that is kept, and one pass in slot order writes the index. The result
 * does not depend on threads. */
#include "tile.h"

enum { BITS = 11, BINS = 1 << BITS };

/* Returns an integer key that orders as the score does. NaN has key 0, below that of -inf; -0 and +0 have the same
 * key. */
static inline uint32_t key_of(float score) {
  const uint32_t bits = kv_bits(score), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0;
  return bits >> 31 ? 0x80000000u - magnitude : 0x80000000u + magnitude;
}

/* Returns the rank-th largest key of score[begin..end); rank 1 is the largest. Sets *equal to how many slots with this
 * key are kept. */
static uint32_t key_at_rank(const float *score, int64_t begin, int64_t end, int64_t rank, int64_t *equal) {
  uint32_t prefix = 0, known = 0; /* the bits of the key found so far, and the mask of their places */
  for (int shift = 32 - BITS; known != UINT32_MAX; shift = shift > BITS ? shift - BITS : 0) {
    int32_t count[BINS] = {0};
    for (int64_t i = begin; i < end; i++) {
      uint32_t key = key_of(score[i]);
      if ((key & known) == prefix) count[key >> shift & (BINS - 1)]++;
    }
    int bin = BINS - 1;
    for (; count[bin] < rank; bin--) rank -= count[bin];
    prefix |= (uint32_t)bin << shift;
    known |= (uint32_t)(BINS - 1) << shift;
  }
  *equal = rank;
  return prefix;
}

static void select_heads(void *ctx, int64_t begin, int64_t end) {
  const kv_select *a = ctx;
  for (int64_t head = begin; head < end; head++) {
    int64_t b = head / a->Hkv, n = a->n[head], keep = a->keep[head];
    int64_t first = kv_min(a->protect_first[b], n);           /* slots 0 .. first - 1 are protected */
    int64_t last = n - kv_min(a->protect_last[b], n - first); /* slots last .. n - 1 are protected */
    int64_t wanted = keep - first - (n - last);               /* slots to choose from first .. last - 1 */
    const float *score = a->score + head * a->C;
    int32_t *index = a->index + head * a->K;
    int64_t to = 0;
    for (int64_t i = 0; i < first; i++) index[to++] = (int32_t)i;
    if (wanted == last - first) {
      for (int64_t i = first; i < last; i++) index[to++] = (int32_t)i;
    } else if (wanted > 0) {
      int64_t equal;
      uint32_t bar = key_at_rank(score, first, last, wanted, &equal);
      for (int64_t i = first, stop = first + wanted; to < stop; i++) {
        uint32_t key = key_of(score[i]);
        int tie = key == bar && equal > 0;
        index[to] = (int32_t)i;
        to += key > bar || tie;
        equal -= tie;
      }
    }
    for (int64_t i = last; i < n; i++) index[to++] = (int32_t)i;
    for (; to < a->K; to++) index[to] = -1;
  }
}

kv_status KV_OP(select)(const kv_select *a) {
  /* A thread gets heads with about 16 thousand scores or more: waking it costs as much as ranking 16 thousand. */
  kv_parallel_for(a->B * a->Hkv, 1 + 16384 / (a->C + 1), select_heads, (void *)a);
  return KV_OK;
}
