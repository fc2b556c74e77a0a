/* The contract between callers and kernels: plain C11, one struct per op.
 *
 * Dimensions
 *   B    batch rows             H    query heads          Hkv  key/value heads; a GQA group is G = H / Hkv query heads
 *   T    query rows of a chunk  S    new keys             D    head dimension, a multiple of 8 in 8..512
 *   R    observing query rows   C    columns of a result  K    columns of an index
 *
 * A slot is one token's key and value in one kv head. The alive slots of a head are its stored slots, then the new keys
 * and values of the chunk: [stored | new]. Stored slot i has index i < len[b,h]; new key j (first[b] <= j < stop[b];
 * j < S in an op without stop) has index len[b,h] + j - first[b]. New keys before first[b] are left padding: no row
 * sees them and they are never stored. n[b,h] is the number of alive slots.
 *
 * A pointer's comment gives its array's shape. Arrays are row-major and aligned to their element size. `*_stride` count
 * elements, and the last dimension is contiguous. A logit is x = scale * q.k or, if softcap > 0,
 * softcap * tanh(x / softcap). Sums are fp32 for every dtype. Pointers are not NULL unless their comment allows it. */
#ifndef KVEVICT_H
#define KVEVICT_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __CUDACC__
#define KV_ANYWHERE static __host__ __device__ inline
#else
#define KV_ANYWHERE static inline
#endif

/* The largest head dimension D: on a CPU a kernel keeps a row on its stack; on a GPU it keeps a tile in shared memory.
 * compact has no tile and takes KV_MOST_D on both. */
enum { KV_MOST_D = 512, KV_MOST_D_CUDA = 256 };

typedef enum { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 } kv_dtype;
/* kv_kind is the storage format of a stored row. KV_AS_COMPUTED: D numbers of the call's dtype. A row of another format
 * is packed and may start at any address: it holds x - c as D numbers of few bits, then 4 bytes with their scale. c is
 * the head's centre (kv_slots) for keys, and 0 for values or without a centre:
 *   KV_INT8  q = (x - c) / s as D numbers of int8, then s = max |x - c| / 127 in fp32
 *   KV_INT4  u = (y - lo) / s as D / 2 bytes, with y the Hadamard transform of x - c; byte i has number i in its low
 *            half and number i + D / 2 in its high half; then s = (max y - lo) / 15 and lo = min y in fp16. The
 *            transform multiplies by the orthonormal Hadamard matrix of the largest power of two that divides D,
 *            block by block; u is computed with s and lo as rounded to fp16.
 * A row with an inf or a NaN is read back as all NaN. A new row is packed once, when it is stored; later moves copy its
 * bytes. */
#define KV_KINDS(X) /* X(NAME, name, bits of a number, whether the row is Hadamard-transformed) */ \
  X(INT8, int8, 8, 0)                                                                              \
  X(INT4, int4, 4, 1)
#define KV_ENUMERATOR(NAME, name, bits, rotated) KV_##NAME,
#define KV_BITS(NAME, name, bits, rotated) kind == KV_##NAME ? bits:
#define KV_ROTATED(NAME, name, bits, rotated) || (rotated && kind == KV_##NAME)
typedef enum { KV_AS_COMPUTED, KV_KINDS(KV_ENUMERATOR) KV_KIND_COUNT } kv_kind;
KV_ANYWHERE int64_t kv_packed_bytes(kv_kind kind, int64_t D) { return D * (KV_KINDS(KV_BITS) 0) / 8 + 4; }
KV_ANYWHERE int kv_is_rotated(kv_kind kind) { return 0 KV_KINDS(KV_ROTATED); }
#undef KV_ENUMERATOR
#undef KV_BITS
#undef KV_ROTATED

typedef enum { KV_SUM = 0, KV_MEAN = 1, KV_MAX = 2, KV_NONE = 3 } kv_reduce; /* KV_NONE: one result per query head */
typedef enum { KV_A = 0, KV_SQUARE = 1, KV_ENTROPY = 2 } kv_term;
typedef enum { KV_EDIE = 0, KV_L1 = 1, KV_L2 = 2 } kv_error_kind;
typedef enum {
  KV_OK = 0,
  KV_BAD_SHAPE, /* a dimension is negative, H is not a multiple of Hkv, D is not a multiple of 8 or too large */
  KV_BAD_DTYPE, /* a dtype, kv_kind or reduction is unknown, or this op does not take it */
  KV_BAD_COUNT, /* keep, len, first, stop, lo, hi or an index is out of range */
  KV_NO_MEMORY, /* scratch could not be allocated */
  KV_BAD_KIND,  /* rows that are moved into each other or read together differ in format (kv_kind) */
  KV_NO_KIND,   /* this op's CUDA kernel does not read packed slots; its CPU kernel does */
  KV_BAD_ISA,   /* the environment variable KVEVICT_CPU_ISA names no instruction set of this build */
} kv_status;

const char *kv_status_text(kv_status status);

/* The stored slots of one layer: kv head h of batch row b owns rows offset[b,h] .. offset[b,h] + len[b,h] - 1. */
typedef struct {
  void *k, *v;           /* [rows, D] of dtype, or packed rows (kv_kind) */
  int32_t *pos;          /* [rows] token positions; a key is stored rotated (RoPE) for its position */
  const int64_t *offset; /* [B, Hkv] first row of a head */
  const int32_t *len;    /* [B, Hkv] number of stored slots of a head */
  kv_kind k_kind, v_kind;
  const float *centre; /* [B, Hkv, D] what is subtracted from keys before they are packed; NULL: nothing */
} kv_slots;

/* The new keys and values of a chunk, read in place with the model's strides. */
typedef struct {
  const void *k, *v;                /* [B, Hkv, S, D] dtype */
  int64_t k_stride[3], v_stride[3]; /* of b, h and s */
  const int32_t *pos;               /* [B, S] token positions */
  const int32_t *first;             /* [B] the first new key that is not left padding, 0..S */
} kv_new;

/* Attention over [stored | new]. Query row t sees every stored slot and the new keys first[b] <= j <= t + S - T; if
 * stop is given, every row sees the new keys first[b] <= j < stop[b] instead. A row that sees nothing gets out = 0 and
 * lse = its sink, or -inf without a sink. A row whose logits are all -inf gets the same if the values that it sees are
 * finite; if not, its out is 0 or NaN. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, T, S, D;
  float scale, softcap;
  const void *q; /* [B, H, T, D] dtype */
  int64_t q_stride[3];
  kv_slots slots;      /* pos unused */
  kv_new chunk;        /* pos unused */
  const int32_t *stop; /* [B] end (exclusive) of the new keys that are seen, first[b]..S; NULL: rows are causal */
  const float *sinks;  /* [H] attention sinks: one more logit per row, without a value (GPT-OSS); or NULL */
  void *out;           /* [B, T, H, D] dtype */
  float *lse;          /* [B, H, T] natural log-sum-exp of each row's logits, including the sink */
  int64_t rows;        /* number of rows of the slot buffers; read only on CUDA, as a bound of the work */
} kv_attend;

/* R observing query rows. Per query head, row r with row_first[b] <= r < R has the attention weights
 * a[r,i] = exp(logit[r,i] - lse[r]) over the alive slots i. If `causal`, the rows are the queries of the last R alive
 * slots, so row r sees slot i iff i <= n - R + r; otherwise every row sees all slots. A row with an lse of -inf sees
 * none. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, R, S, D;
  float scale, softcap;
  int causal;
  const void *q; /* [B, H, R, D] dtype */
  int64_t q_stride[3];
  const int32_t *row_first; /* [B] the first observing row, 0..R; R: no row observes and every result is 0 */
  kv_slots slots;           /* pos unused; v only read by kv_error */
  kv_new chunk;             /* pos unused; v only read by kv_error */
  const int32_t *stop;      /* [B] end (exclusive) of the new keys that are seen and scored, first[b]..S */
  const float *lse;         /* [B, H, R] from kv_attend; NULL: computed over the slots that the row sees here */
  int64_t lse_stride[2];    /* of b and h */
  const float *sinks;       /* [H] or NULL; read only if lse is NULL */
  const float *weight;      /* [B, H, R] factor of a row's contribution; NULL: 1; not read by kv_peak */
  int64_t weight_stride[2]; /* of b and h */
} kv_observers;

/* The score of every alive slot i: weight[r] times a[r,i] (KV_A), a[r,i]^2 (KV_SQUARE) or -a[r,i] ln a[r,i]
 * (KV_ENTROPY, 0 for a = 0), reduced over the observing rows r (KV_MEAN: divided by their number), then over the G
 * heads of the group. */
typedef struct {
  kv_observers rows;
  int64_t C;
  kv_term term;
  kv_reduce reduce; /* over the observing rows; KV_MAX takes neither weight nor KV_ENTROPY */
  kv_reduce group;  /* over the heads of a group; KV_NONE: every query head has its own result */
  float *out;       /* [B, Hkv, C], with KV_NONE [B, H, C]; C >= every n; columns from n on are 0 */
} kv_score;

/* Each observing row's largest attention weight a[r,i] over the slots lo[b,h] <= i < hi[b,h]; 0 where a row sees none
 * of these slots or does not observe. */
typedef struct {
  kv_observers rows;
  const int32_t *lo, *hi; /* [B, Hkv] 0 <= lo <= hi <= n */
  float *out;             /* [B, H, R] */
} kv_peak;

/* The error of the attention outputs when slot i alone is removed, summed over the observing rows r. o_r is a row's
 * output, v_i the slot's value and a = a[r,i]; EDIE and CAOTE are methods of eviction by output error:
 *   KV_EDIE  weight[r] * a / max(1 + alpha - a, 1e-6) * (||v_i||_1 + ||o_r||_1)   EDIE eq. 9-11, a bound if alpha = 0
 *   KV_L1    weight[r] * a / max(1 - a, 1e-6) * ||v_i - o_r||_1                   EDIE eq. 7, in the 1-norm
 *   KV_L2    weight[r] * a / max(1 - a, 1e-6) * ||v_i - o_r||_2                   CAOTE eq. 6, in the 2-norm */
typedef struct {
  kv_observers rows;
  int64_t C;
  kv_error_kind kind;
  kv_reduce group;
  float alpha;         /* >= 0, KV_EDIE only */
  const void *o;       /* [B, R, H, D] dtype, outputs of the observing rows: part of kv_attend's out */
  int64_t o_stride[3]; /* of b, r and h */
  float *out;          /* [B, Hkv, C], with KV_NONE [B, H, C]; columns from n on are 0 */
} kv_error;

/* attend in which the last R of the T rows observe: out and lse of all rows, and what score, error or peak define over
 * the observing rows, in one call and with the same bits. Of the observers' struct only R, row_first, stop, causal and
 * weight are given, and what it adds to kv_observers, except o; kv_last_rows fills the rest. Rows of attend are causal
 * (its stop is NULL).
 *
 * If span >= 0, an observing row's attention weights are those of a softmax over each head's first min(span, len)
 * stored slots and the new ones that the row sees in attend, in place of all that it sees there (KVzip). */
typedef struct {
  kv_attend attend;
  kv_score score;
  int span; /* -1: none */
} kv_attend_score;
typedef struct {
  kv_attend attend;
  kv_error error;
} kv_attend_error;
typedef struct {
  kv_attend attend;
  kv_peak peak;
} kv_attend_peak;

/* Fills the observers of a call of attend from the call itself: the last R rows, with their lse. */
KV_ANYWHERE void kv_last_rows(const kv_attend *a, kv_observers *x) {
  const int64_t before = a->T - x->R, size = a->dtype == KV_F32 ? 4 : 2;
  x->dtype = a->dtype, x->B = a->B, x->H = a->H, x->Hkv = a->Hkv, x->S = a->S, x->D = a->D;
  x->scale = a->scale, x->softcap = a->softcap, x->slots = a->slots, x->chunk = a->chunk, x->sinks = a->sinks;
  x->q = (const char *)a->q + before * a->q_stride[2] * size;
  for (int i = 0; i < 3; i++) x->q_stride[i] = a->q_stride[i];
  x->lse = a->lse + before, x->lse_stride[0] = a->H * a->T, x->lse_stride[1] = a->T;
}

/* Makes the outputs of a call of attend those of its observers. */
KV_ANYWHERE void kv_last_outputs(const kv_attend *a, kv_error *x) {
  const int64_t row = a->H * a->D, size = a->dtype == KV_F32 ? 4 : 2;
  x->o = (const char *)a->out + (a->T - x->rows.R) * row * size;
  x->o_stride[0] = a->T * row, x->o_stride[1] = row, x->o_stride[2] = a->D;
}

/* KL divergence from a target to the observing rows' mean attention, per query head (LookaheadKV eq. 5). p[i] is the
 * mean of a[r,i] over the observing rows and t the target, each divided by its sum over the first min(N, n) alive
 * slots:
 *   loss = sum t[i] ln(t[i] / p[i]), with the mean raised to at least KV_KL_LEAST before it is divided;
 *   0 where t or p sums to 0. */
#define KV_KL_LEAST 1e-30f
typedef struct {
  kv_observers rows; /* weight and lse are NULL; lse is computed over the slots that the rows see here */
  int64_t N, C;
  const float *target; /* [B, H, N] >= 0 */
  float *loss;         /* [B, H] */
  float *lse;          /* [B, H, R] the rows' log-sum-exp, an input of kv_kl_grad */
  float *mean_attn;    /* [B, H, C] mean of a[r,i] over rows r, not rescaled to sum to 1 over i; 0 in columns >= n */
} kv_kl;

/* The gradients of the sum of grad times kv_kl's loss over all query heads, to the queries and the new keys; stored
 * keys are constants. */
typedef struct {
  kv_observers rows; /* as for kv_kl, with the lse from kv_kl */
  int64_t N, C;
  const float *target, *mean_attn; /* the target and the mean attention of kv_kl */
  const float *grad;               /* [B, H] factors of the losses */
  float *dq;                       /* [B, H, R, D] gradient to the queries */
  float *dk;                       /* [B, Hkv, S, D] gradient to the new keys; 0 outside keys first .. stop - 1 */
} kv_kl_grad;

/* CAOTE (eviction by output error, eq. 6-8): the error of a kv head's output when slot i is removed,
 * hn_i / (1 - hn_i) * ||v_i - m||_2 with m = sum hn v. A pooled score h >= 0 takes the place of the attention weight:
 * hn = h / sum h over the head's n alive slots, 1/n if the sum is 0. A slot with hn > 1 - 1e-6 gets FLT_MAX. A NaN
 * among a head's scores makes all its results NaN. */
typedef struct {
  kv_dtype dtype;
  int64_t B, Hkv, S, D, C;
  int fast;            /* whether m is the unweighted mean of v (FastCAOTE) */
  int squared;         /* whether the norm is squared */
  const float *score;  /* [B, Hkv, C] the pooled scores h; columns from n on are not read */
  kv_slots slots;      /* k, pos unused */
  kv_new chunk;        /* k, pos unused */
  const int32_t *stop; /* [B] end (exclusive) of the new slots, first[b]..S */
  float *out;          /* [B, Hkv, C], columns from n on are 0; may not be score */
} kv_refine;

/* The norm ||x_i||_p of every alive slot, where x are the keys or the values. */
typedef struct {
  kv_dtype dtype;
  int64_t B, Hkv, S, D, C;
  int p;               /* 1 or 2 */
  kv_slots slots;      /* k holds x; v, pos unused */
  kv_new chunk;        /* k holds x; v, pos unused */
  const int32_t *stop; /* [B] end (exclusive) of the new slots, first[b]..S */
  float *out;          /* [B, Hkv, C], columns from n on are 0 */
} kv_norm;

/* The quadratic form x_i . (A x_i + b) for every alive slot i and every query head, where x are the keys or the values
 * of the query head's kv head. It is ||W x_i||^2 if A = W^T W, or the exponent of an expected attention weight. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, S, D, C;
  kv_slots slots;           /* k holds x; v, pos unused */
  kv_new chunk;             /* k holds x; v, pos unused */
  const int32_t *stop;      /* [B] end (exclusive) of the new slots, first[b]..S */
  const float *matrix;      /* [B, H, D, D] A */
  int64_t matrix_stride[3]; /* of b, h and the row of A */
  const float *linear;      /* [B, H, D] b, or NULL: 0 */
  int64_t linear_stride[2]; /* of b and h */
  float *out;               /* [B, H, C], columns from n on are 0 */
} kv_quadratic;

/* The exponential average of a probe's queries over a prompt's chunks (TAKE eq. 9), of each row:
 *   out = decay[b] * Rot(past) + (1 - decay[b]) * q,   Rot(x)[d] = x[d] * cos[b,d] + x[partner[d]] * sin[b,d]
 * Rot rotates the average to the positions of this chunk's probe; without cos, sin and partner Rot(x) = x, as eq. 9 is
 * printed. Every product and sum is rounded to fp32. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, R, D;
  const void *q; /* [B, H, R, D] dtype, this chunk's queries */
  int64_t q_stride[3];
  const float *past;      /* [B, H, R, D] the average so far */
  const float *decay;     /* [B] weight of the past, 0 for a batch row that has none */
  const float *cos, *sin; /* [B, D] or NULL */
  const int32_t *partner; /* [D] or NULL: the number that is paired with each, 0..D - 1 */
  float *out;             /* [B, H, R, D] */
} kv_probe;

/* Chooses keep[b,h] slots of each head: the first protect_first[b] and the last protect_last[b] alive slots, then those
 * with the largest scores, of equal scores the lower slot first; NaN ranks below every number. */
typedef struct {
  int64_t B, Hkv, C, K;
  const float *score;           /* [B, Hkv, C]; scores of protected slots are not read */
  const int32_t *n;             /* [B, Hkv] number of alive slots; may exceed C if the slots beyond C are protected */
  const int32_t *keep;          /* [B, Hkv] number of slots to keep, min(n, protect_first + protect_last)..min(n, K) */
  const int32_t *protect_first; /* [B] number of protected slots at the start */
  const int32_t *protect_last;  /* [B] number of protected slots at the end */
  int32_t *index;               /* [B, Hkv, K] ascending slot indices; columns from keep on are -1 */
} kv_select;

/* Moves the chosen slots of [src | new] into dst, in order. dst may be src (same buffers, same offsets): with an
 * ascending index no slot is read after it was overwritten. If dst has other offsets in the same buffers, no row of dst
 * may be a row of src. A row is packed if only dst is packed, and unpacked if only src is; if both are packed, they
 * must have the same format. */
typedef struct {
  kv_dtype dtype;
  int64_t B, Hkv, S, D, K;
  kv_slots src;
  kv_new chunk;
  const int32_t *index; /* [B, Hkv, K] the chosen slots, ascending; NULL: slots 0..keep-1 */
  const int32_t *keep;  /* [B, Hkv] number of chosen slots */
  kv_slots dst;         /* len unused */
} kv_compact;

/* One decode step: writes the new key and value as row offset + len of each head's `slots`, then attends over the slots
 * of `prefix`, the len stored slots of `slots` and the new slot. The caller must have made room, and adds 1 to len
 * afterwards. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, D, C;
  float scale, softcap;
  const void *q; /* [B, H, 1, D] dtype */
  int64_t q_stride[3];
  kv_new chunk;   /* S = 1; first unused */
  kv_slots slots; /* the new row is written at offset + len */
  /* Slots of a shared prefix, which come before `slots` and have the same formats and centre. They are only read: no
   * row of the prefix may be a row that is written. Batch rows share a head's prefix if their offset and len are equal:
   * a kernel may read it once for all of them, which changes no bit. pos and centre unused. All pointers NULL: no
   * prefix. */
  kv_slots prefix;
  const float *sinks;        /* [H] or NULL */
  void *out;                 /* [B, 1, H, D] dtype */
  float *lse;                /* [B, H, 1] */
  float *probs;              /* [B, Hkv, C] attention weights averaged over the group, 0 after the new slot; or NULL */
  int64_t rows, rows_prefix; /* numbers of rows of the slot buffers; read only on CUDA, as a bound of the work */
} kv_decode;

/* torch's linear for a few rows, y = x weight^T + bias, on CPUs only. Sums are fp32 and rounded once; a row's sums do
 * not depend on the other rows. */
typedef struct {
  kv_dtype dtype;
  int64_t B, T, N, K; /* K a multiple of 32 */
  const void *x;      /* [B, T, K] dtype */
  int64_t x_stride[2];
  const void *weight; /* [N, K] dtype */
  const void *bias;   /* [N] dtype or NULL */
  void *out;          /* [B, T, N] dtype */
} kv_linear;

/* The lists of ops: KV_CPU_OPS have a CPU kernel alone, KV_BOTH_OPS a CUDA kernel, too. Prototypes, the dispatch table
 * and the registration expand X(op, with) for every op; `with` is a further argument of X. */
#define KV_CPU_OPS(X, with) X(linear, with)
#define KV_OPS(X, with) KV_BOTH_OPS(X, with) KV_CPU_OPS(X, with)
#define KV_BOTH_OPS(X, with) \
  X(attend, with)            \
  X(score, with)             \
  X(peak, with)              \
  X(error, with)             \
  X(attend_score, with)      \
  X(attend_error, with)      \
  X(attend_peak, with)       \
  X(kl, with)                \
  X(kl_grad, with)           \
  X(refine, with)            \
  X(norm, with) X(quadratic, with) X(probe, with) X(select, with) X(compact, with) X(decode, with)

/* kv_<op>_check checks shapes, dtypes and, if `counts` is set, the arrays of lengths, counts and indices, which must
 * then be in the CPU's memory. kv_<op>_cpu begins with all of these checks.
 *
 * kv_<op>_cuda runs on the current CUDA device, on `stream` (a cudaStream_t), without waiting for it. Every pointer in
 * the struct is to that device's memory. Every row of q, k, v, o and the slots starts at a multiple of 16 bytes, or of
 * 4 bytes if it is packed. scratch has kv_<op>_cuda_scratch(a) bytes, aligned to 256, with any content. The struct must
 * have passed kv_<op>_check without `counts`; the caller guarantees the counts, since reading them would wait for the
 * device. kv_<op>_cuda returns 0, or the cudaError_t of a launch that failed; kv_cuda_text returns that error's
 * text. */
#define KV_PROTOTYPES(op, with)                            \
  kv_status kv_##op##_check(const kv_##op *a, int counts); \
  kv_status kv_##op##_cpu(const kv_##op *a);
#define KV_CUDA_PROTOTYPES(op, with)                \
  int64_t kv_##op##_cuda_scratch(const kv_##op *a); \
  int kv_##op##_cuda(const kv_##op *a, void *scratch, void *stream);
KV_OPS(KV_PROTOTYPES, )
KV_BOTH_OPS(KV_CUDA_PROTOTYPES, )
#undef KV_PROTOTYPES
#undef KV_CUDA_PROTOTYPES
const char *kv_cuda_text(int error);

/* Threads. kv_set_parallel sets how the kernels' loops run, at any time and from any thread; until then they run on the
 * calling thread. A kv_parallel calls body(ctx, begin, end) with disjoint ranges begin .. end - 1 that cover
 * 0 .. n - 1. */
typedef void (*kv_body)(void *ctx, int64_t begin, int64_t end);
typedef void (*kv_parallel)(int64_t n, int64_t grain, kv_body body, void *ctx);
void kv_set_parallel(kv_parallel parallel, int threads);

/* kv_cpu_isas lists the instruction sets of this build in ascending order: "scalar avx2 avx512 avx512bf16 amxbf16" on
 * x86-64, "neon neonbf16" on ARM, else "scalar". kv_cpu_isa names the one that the CPU kernels run with, the highest
 * that the processor has. The environment variable KVEVICT_CPU_ISA, read once, names the highest set that may be
 * chosen. "avx512bf16" is chosen only if the variable names it or if it is faster than avx512. If the variable is set
 * to anything else than a set of this build, kv_cpu_isa returns NULL and every op KV_BAD_ISA. */
const char *kv_cpu_isas(void);
const char *kv_cpu_isa(void);

#ifdef __cplusplus
}
#endif
#endif
