/* The contract between callers and kernels: plain C11, one struct per op.
 *
 * Dimensions
 *   B    batch rows             H    query heads          Hkv  key/value heads, H = G * Hkv
 *   T    query rows of a chunk  S    new columns (keys)   D    head dimension, a multiple of 8 in 8..256
 *   R    observing rows         C    columns of a score   K    columns of an index
 *
 * Slot order. A head's alive slots are [stored | new]: stored slot i has index i < len[b,h]; new column j
 * (first[b] <= j < stop[b], where an op has no stop it is S) has index len[b,h] + j - first[b]. Columns before
 * first[b] are left padding: no row sees them and they are never stored. n[b,h] is the number of alive slots.
 *
 * Pointers are to row-major arrays of the shape after them; `*_stride` are in elements and the last dimension
 * is contiguous. Logits are q.k * scale, then softcap * tanh(x / softcap) if softcap > 0. Sums accumulate in
 * fp32 whatever the dtype. `first`, `row_first`, `len` and the like may not be NULL; what may is marked.
 */
#ifndef KVEVICT_H
#define KVEVICT_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 } kv_dtype;
typedef enum { KV_SUM = 0, KV_MEAN = 1, KV_MAX = 2 } kv_reduce;
typedef enum {
  KV_OK = 0,
  KV_BAD_SHAPE, /* a dimension is negative, H is no multiple of Hkv, D is no multiple of 8 or over 256 */
  KV_BAD_DTYPE, /* a dtype or a reduction that is none of the above */
  KV_BAD_COUNT, /* keep, len, first, stop or an index outside what is alive */
  KV_NO_MEMORY, /* scratch could not be allocated */
} kv_status;

const char *kv_status_text(kv_status status);

/* The slots stored in one layer: head h of row b owns rows offset[b,h] .. offset[b,h] + len[b,h] - 1. */
typedef struct {
  void *k, *v;           /* [rows, D] dtype */
  int32_t *pos;          /* [rows] the position each slot was rotated with */
  const int64_t *offset; /* [B, Hkv] */
  const int32_t *len;    /* [B, Hkv] */
} kv_slots;

/* The new keys and values of a chunk, read where the model left them. */
typedef struct {
  const void *k, *v;                /* [B, Hkv, S, D] dtype */
  int64_t k_stride[3], v_stride[3]; /* b, h, s */
  const int32_t *pos;               /* [B, S] */
  const int32_t *first;             /* [B] 0..S */
} kv_new;

/* Chunk attention over [stored | new]. Row t sees every stored slot and the new columns
 * first[b] <= j <= t + S - T. A row that sees nothing gets out = 0 and lse = its sink, -inf without one. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, T, S, D;
  float scale, softcap;
  const void *q; /* [B, H, T, D] dtype */
  int64_t q_stride[3];
  kv_slots slots;     /* pos unused */
  kv_new fresh;       /* pos unused */
  const float *sinks; /* [H] logit of a column without a value (GPT-OSS), or NULL */
  void *out;          /* [B, T, H, D] dtype */
  float *lse;         /* [B, H, T] natural log of the row's sum of exponentials, the sink's included */
} kv_attend;
kv_status kv_attend_cpu(const kv_attend *a);

/* Importance of every alive slot from R observing rows: a[r,i] = exp(logit[r,i] - lse[r]), reduced over the
 * rows row_first[b] <= r < R per query head, then averaged over the G heads of the group.
 * causal: the rows are the last R alive slots' own, so row r sees slot i iff i <= n - R + r; otherwise all. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, R, S, D, C;
  float scale, softcap;
  int causal;
  kv_reduce reduce;
  const void *q; /* [B, H, R, D] dtype */
  int64_t q_stride[3];
  const int32_t *row_first; /* [B] 0..R; R = no row observes and every score is 0 */
  kv_slots slots;           /* v, pos unused */
  kv_new fresh;             /* v, pos unused */
  const int32_t *stop;      /* [B] first[b]..S: new columns from here on are not scored and not seen */
  const float *lse;         /* [B, H, R] from kv_attend, or NULL: taken over the columns the row sees here */
  int64_t lse_stride[2];    /* b, h */
  const float *sinks;       /* [H] or NULL; only read when lse is NULL */
  float *out;               /* [B, Hkv, C], C >= max n; columns from n on are 0 */
} kv_score;
kv_status kv_score_cpu(const kv_score *a);

/* The keep[b,h] best slots: the first protect_first[b] and the last protect_last[b] alive slots, then by
 * (score descending, slot ascending); NaN ranks below every number. */
typedef struct {
  int64_t B, Hkv, C, K;
  const float *score;           /* [B, Hkv, C]; protected slots' scores are not read */
  const int32_t *n;             /* [B, Hkv] 0..; more than C only if the slots beyond C are protected */
  const int32_t *keep;          /* [B, Hkv] min(n, protect_first + protect_last)..min(n, K) */
  const int32_t *protect_first; /* [B] */
  const int32_t *protect_last;  /* [B] */
  int32_t *index;               /* [B, Hkv, K] ascending slot indices; columns from keep on are -1 */
} kv_select;
kv_status kv_select_cpu(const kv_select *a);

/* Move the chosen slots of [src | fresh] into dst, in order. dst may be src (same buffers, same offsets):
 * an ascending index never reads a slot that was already overwritten. */
typedef struct {
  kv_dtype dtype;
  int64_t B, Hkv, S, D, K;
  kv_slots src;
  kv_new fresh;
  const int32_t *index; /* [B, Hkv, K] ascending, or NULL: slots 0..keep-1 */
  const int32_t *keep;  /* [B, Hkv] */
  kv_slots dst;         /* len unused */
} kv_compact;
kv_status kv_compact_cpu(const kv_compact *a);

/* One decode step: write the new row behind each head's slots, then attend over len + 1 slots.
 * The caller has made room, and adds 1 to len afterwards. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, D, C;
  float scale, softcap;
  const void *q; /* [B, H, 1, D] dtype */
  int64_t q_stride[3];
  kv_new fresh;       /* S = 1; first unused */
  kv_slots slots;     /* written at offset + len */
  const float *sinks; /* [H] or NULL */
  void *out;          /* [B, 1, H, D] dtype */
  float *lse;         /* [B, H, 1] */
  float *probs; /* [B, Hkv, C] the row's attention, averaged over the group; columns past the new slot are 0; or NULL */
} kv_decode;
kv_status kv_decode_cpu(const kv_decode *a);

/* Threads. The host program sets how loops run; unset, they run one after the other. body(ctx, begin, end)
 * is called with disjoint ranges that cover 0..n. */
typedef void (*kv_body)(void *ctx, int64_t begin, int64_t end);
typedef void (*kv_parallel)(int64_t n, int64_t grain, kv_body body, void *ctx);
void kv_set_parallel(kv_parallel parallel, int threads);

/* Name of the instruction set the CPU kernels run with: "avx512", "avx2" or "scalar". Environment variable
 * KVEVICT_CPU_ISA caps it (read once). */
const char *kv_cpu_isa(void);

#ifdef __cplusplus
}
#endif
#endif
