/* The rows of one head's alive keys or values on a CPU: the one place that knows how numbers of a slot are stored. A
 * row is read as floats, as pairs of bf16, or in place with the rows after it. Only compact and decode's append write
 * rows, and copy them as bytes. */
#ifndef KVEVICT_COLUMNS_H
#define KVEVICT_COLUMNS_H
#include "half.h"
#include "segments.h"

/* The alive keys or values of one (b, kv head): column c of its attention matrix is slot c. */
typedef struct {
  kv_dtype dtype;
  int64_t D, n;
  kv_segments at;
} kv_columns;

static inline kv_columns kv_columns_of(kv_dtype dtype, int64_t D, kv_segments at) {
  return (kv_columns){dtype, D, at.n, at};
}

/* Of [stored | new], new ones up to `stop`. */
static inline kv_columns kv_key_columns(kv_dtype dtype, int64_t D, const kv_slots *slots, const kv_new *chunk,
                                        int64_t b, int64_t h, int64_t Hkv, int64_t stop) {
  return kv_columns_of(dtype, D, kv_keys_of(slots, chunk, b, h, Hkv, stop, D, kv_size(dtype)));
}
static inline kv_columns kv_value_columns(kv_dtype dtype, int64_t D, const kv_slots *slots, const kv_new *chunk,
                                          int64_t b, int64_t h, int64_t Hkv, int64_t stop) {
  return kv_columns_of(dtype, D, kv_values_of(slots, chunk, b, h, Hkv, stop, D, kv_size(dtype)));
}

/* Of two buffers of stored slots: `shared_len` rows from `shared` on in the first, then `len` rows from `own` on. */
static inline kv_columns kv_stored_columns(kv_dtype dtype, int64_t D, const void *shared_rows, int64_t shared,
                                           int64_t shared_len, const void *own_rows, int64_t own, int64_t len) {
  const int64_t dense[3] = {0, 0, D};
  return kv_columns_of(
      dtype, D,
      kv_segments_of(shared_rows, shared, shared_len, own_rows, dense, 0, 0, own, own + len, D, kv_size(dtype)));
}

static inline const void *kv_column(const kv_columns *x, int64_t c) {
  return (const void *)(uintptr_t)kv_segments_at(&x->at, c);
}

/* Column c -> row [D] */
static inline void kv_column_load(const kv_columns *x, int64_t c, float *restrict row) {
  kv_load_row(x->dtype, kv_column(x, c), row, x->D);
}

/* Column c as D floats: in place, or converted into row [D]. */
static inline const float *kv_column_floats(const kv_columns *x, int64_t c, float *row) {
  if (x->dtype == KV_F32) return kv_column(x, c);
  kv_load_row(x->dtype, kv_column(x, c), row, x->D);
  return row;
}

/* Column c as D numbers of bf16, for processors that multiply pairs of them. */
static inline const uint16_t *kv_column_pairs(const kv_columns *x, int64_t c) { return kv_column(x, c); }

/* n columns where they lie, `stride` bytes apart. */
typedef struct {
  const char *x;
  int64_t n, stride;
} kv_run;

/* Columns c .. c + n - 1, or the first of them that are evenly spaced. */
static inline kv_run kv_columns_run(const kv_columns *x, int64_t c, int64_t n) {
  const int64_t stored = x->at.len - c;
  if (stored <= 0) return (kv_run){kv_column(x, c), n, x->at.chunk_stride};
  return (kv_run){kv_column(x, c), stored < n ? stored : n, x->at.stored_stride};
}

/* The address of column c, to be fetched ahead with those after it; 0 if rows do not lie one after the other. */
static inline uintptr_t kv_columns_ahead(const kv_columns *x, int64_t c) {
  const int64_t stride = c < x->at.len ? x->at.stored_stride : x->at.chunk_stride;
  return stride == x->D * kv_size(x->dtype) ? kv_segments_at(&x->at, c) : 0;
}
#endif
