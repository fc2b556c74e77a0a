/* Reads the keys or values of one head's alive slots on a CPU. Only this file knows how a slot's numbers are stored. A
 * reader gets a row as floats, as pairs of bf16, or as a pointer into the buffer, where the next rows follow. compact
 * and decode alone write rows: compact copies stored rows as bytes; both pack the rows that they store first. */
#ifndef KVEVICT_COLUMNS_H
#define KVEVICT_COLUMNS_H
#include "half.h"
#include "packed.h"
#include "segments.h"

/* The alive keys or values of one (b, kv head). Column c of the head's attention matrix is slot c. */
typedef struct {
  kv_dtype dtype;
  kv_kind kind; /* the storage format of columns 0 .. packed - 1; the columns after them are of dtype */
  int64_t D, n, packed;
  const float *centre; /* [D] the centre that was subtracted from packed columns, or NULL */
  kv_segments at;
} kv_columns;

/* Returns the number of bytes of a stored row. */
static inline int64_t kv_row_bytes(kv_kind kind, kv_dtype dtype, int64_t D) {
  return kind == KV_AS_COMPUTED ? D * kv_size(dtype) : kv_packed_bytes(kind, D);
}

/* Returns the columns with the addresses `at`. If the stored rows are packed, it replaces their address and stride in
 * `at`: slot 0 is then row `offset` of `rows`. */
static inline kv_columns kv_columns_of(kv_dtype dtype, int64_t D, kv_segments at, const void *rows, int64_t offset,
                                       kv_kind kind, const float *centre) {
  kv_columns x = {dtype, kind, D, at.n, 0, NULL, at};
  if (kind == KV_AS_COMPUTED) return x;
  const int64_t bytes = kv_packed_bytes(kind, D);
  x.packed = at.len, x.centre = centre;
  x.at.stored = (uint64_t)(uintptr_t)rows + (uint64_t)(offset * bytes), x.at.stored_stride = bytes;
  return x;
}

/* Returns the centre of one head's keys, or NULL. */
static inline const float *kv_centre(const kv_slots *slots, int64_t head, int64_t D) {
  return slots->centre ? slots->centre + head * D : NULL;
}

/* Returns the keys or values [stored | new] of kv head h of batch row b, with the new slots before `stop`. */
static inline kv_columns kv_head_columns(kv_side side, kv_dtype dtype, int64_t D, const kv_slots *slots,
                                         const kv_new *chunk, int64_t b, int64_t h, int64_t Hkv, int64_t stop) {
  const int64_t head = b * Hkv + h;
  const kv_segments at = kv_rows_of(side, slots, chunk, b, h, Hkv, stop, D, kv_size(dtype));
  if (side == KV_VALUES) return kv_columns_of(dtype, D, at, slots->v, slots->offset[head], slots->v_kind, NULL);
  return kv_columns_of(dtype, D, at, slots->k, slots->offset[head], slots->k_kind, kv_centre(slots, head, D));
}

/* Returns the columns of stored slots that lie in two buffers: rows shared .. shared + shared_len - 1 of shared_rows,
 * then rows own .. own + len - 1 of own_rows. */
static inline kv_columns kv_stored_columns(kv_dtype dtype, int64_t D, kv_kind kind, const float *centre,
                                           const void *shared_rows, int64_t shared, int64_t shared_len,
                                           const void *own_rows, int64_t own, int64_t len) {
  const int64_t bytes = kv_row_bytes(kind, dtype, D), dense[3] = {0, 0, bytes};
  const kv_segments at =
      kv_segments_of(shared_rows, shared, shared_len, own_rows, dense, 0, 0, own, own + len, bytes, 1);
  return (kv_columns){dtype, kind, D, at.n, kind == KV_AS_COMPUTED ? 0 : at.n, centre, at};
}

static inline const void *kv_column(const kv_columns *x, int64_t c) {
  return (const void *)(uintptr_t)kv_segments_at(&x->at, c);
}

/* Loads column c as floats into row [D]. */
static inline void kv_column_load(const kv_columns *x, int64_t c, float *restrict row) {
  if (c < x->packed)
    kv_unpack_row(x->kind, x->centre, kv_column(x, c), row, x->D);
  else
    kv_load_row(x->dtype, kv_column(x, c), row, x->D);
}

/* Returns column c as D floats: where it lies, or converted into row [D]. */
static inline const float *kv_column_floats(const kv_columns *x, int64_t c, float *row) {
  if (x->dtype == KV_F32 && c >= x->packed) return kv_column(x, c);
  kv_column_load(x, c, row);
  return row;
}

/* Returns column c as D numbers of bf16, for processors that multiply pairs of them: where it lies or, if it is packed,
 * rounded to bf16 in `row`. */
static inline const void *kv_column_pairs(const kv_columns *x, int64_t c, void *row) {
  if (c >= x->packed) return kv_column(x, c);
  float numbers[KV_MOST_D];
  kv_column_load(x, c, numbers);
  kv_store_row(KV_BF16, numbers, row, x->D);
  return row;
}

/* n columns, the first at x, `stride` bytes apart; all of them are packed or none. */
typedef struct {
  const char *x;
  int64_t n, stride;
} kv_run;

/* Returns columns c .. c + n - 1, or only the stored ones among them if new ones follow, since their distance may
 * differ. */
static inline kv_run kv_columns_run(const kv_columns *x, int64_t c, int64_t n) {
  const int64_t stored = x->at.len - c;
  if (stored <= 0) return (kv_run){kv_column(x, c), n, x->at.chunk_stride};
  return (kv_run){kv_column(x, c), stored < n ? stored : n, x->at.stored_stride};
}

/* Returns the address of column c if the columns from c on lie side by side, so that memory can be fetched ahead; else
 * 0. */
static inline uintptr_t kv_columns_ahead(const kv_columns *x, int64_t c) {
  const int64_t stride = c < x->at.len ? x->at.stored_stride : x->at.chunk_stride;
  return c < x->packed || stride == x->D * kv_size(x->dtype) ? kv_segments_at(&x->at, c) : 0;
}

/* Stores a row of D numbers of dtype at `to`, as it is or packed as `kind`. */
static inline void kv_row_store(kv_dtype dtype, int64_t D, const void *from, kv_kind kind, const float *centre,
                                void *to) {
  float numbers[KV_MOST_D];
  if (kind == KV_AS_COMPUTED) {
    memcpy(to, from, (size_t)(D * kv_size(dtype)));
    return;
  }
  numbers[0] = 0; /* the compiler does not know that D > 0 */
  kv_load_row(dtype, from, numbers, D);
  kv_pack_row(kind, centre, numbers, to, D);
}
#endif
