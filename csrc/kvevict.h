/* The contract between callers and kernels: plain C11, one struct per op.
 *
 * Dimensions
 *   B    batch rows             H    query heads          Hkv  key/value heads, H = G * Hkv
 *   T    query rows of a chunk  S    new keys             D    head dimension, a multiple of 8 in 8..512
 *   R    observing rows         C    columns of a score   K    columns of an index
 *
 * Slot order. A head's alive slots are [stored | new]: stored slot i has index i < len[b,h]; new key j
 * (first[b] <= j < stop[b]; an op without stop: j < S) has index len[b,h] + j - first[b]. New keys before first[b] are
 * left padding: no row sees them and they are never stored. n[b,h] is the number of alive slots.
 *
 * A pointer's comment gives its array's shape. Arrays are row-major and aligned to their element size. `*_stride` count
 * elements, and the last dimension is contiguous. Logits are q.k * scale, then softcap * tanh(x / softcap) if softcap >
 * 0. Sums are fp32 for every dtype. Pointers are not NULL unless their comment allows it. */
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

/* The largest D: on a CPU a row must fit the stack; on a GPU a tile must fit shared memory, except in compact. */
enum { KV_MOST_D = 512, KV_MOST_D_CUDA = 256 };

typedef enum { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 } kv_dtype;
/* The kind of a stored row is how it lies in memory. KV_AS_COMPUTED: D numbers of the call's dtype. A row of another
 * kind is packed and may start at any address: it holds x - c as D numbers of few bits, then 4 bytes with their scale.
 * c is the head's centre for keys, if there is one, and else 0:
 *   KV_INT8  q = (x - c) / s as D numbers of int8, then s = max |x - c| / 127 in fp32
 *   KV_INT4  u = (y - lo) / s as D / 2 bytes, with y = (x - c) H; byte i has number i in its low half and number
 *            i + D / 2 in its high half; then s = (max y - lo) / 15 and lo = min y in fp16. H is the orthonormal
 *            Hadamard matrix of the largest power of two that divides D, applied block by block; u is computed with
 *            s and lo as rounded to fp16.
 * A row with an inf or a NaN is read as NaN. A new row is packed once, when it is stored, and then only moved. */
#define KV_KINDS(X) /* X(NAME, name, bits of a number, whether it is rotated by H) */ \
  X(INT8, int8, 8, 0)                                                                 \
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

typedef enum { KV_SUM = 0, KV_MEAN = 1, KV_MAX = 2, KV_NONE = 3 } kv_reduce; /* KV_NONE: keeps each head of a group */
typedef enum { KV_A = 0, KV_SQUARE = 1, KV_ENTROPY = 2 } kv_term;
typedef enum { KV_EDIE = 0, KV_L1 = 1, KV_L2 = 2 } kv_error_kind;
typedef enum {
  KV_OK = 0,
  KV_BAD_SHAPE, /* a dimension is negative, H is not a multiple of Hkv, D is not a multiple of 8 or too large */
  KV_BAD_DTYPE, /* a dtype, kind or reduction is not one of the above, or this op does not take it */
  KV_BAD_COUNT, /* keep, len, first, stop, lo, hi or an index is out of range */
  KV_NO_MEMORY, /* scratch could not be allocated */
  KV_BAD_KIND,  /* rows that are moved or read together are packed as different kinds */
  KV_NO_KIND,   /* the slots are packed, and only this op's CPU kernel reads such slots */
  KV_BAD_ISA,   /* KVEVICT_CPU_ISA is not an instruction set of this build */
} kv_status;

const char *kv_status_text(kv_status status);

/* The slots stored in one layer: head h of row b owns rows offset[b,h] .. offset[b,h] + len[b,h] - 1. */
typedef struct {
  void *k, *v;           /* [rows, D] dtype, or packed rows */
  int32_t *pos;          /* [rows] the position for which each key was rotated */
  const int64_t *offset; /* [B, Hkv] */
  const int32_t *len;    /* [B, Hkv] */
  kv_kind k_kind, v_kind;
  const float *centre; /* [B, Hkv, D] of packed keys, or NULL: 0 */
} kv_slots;

/* The new keys and values of a chunk, read in place with the model's strides. */
typedef struct {
  const void *k, *v;                /* [B, Hkv, S, D] dtype */
  int64_t k_stride[3], v_stride[3]; /* b, h, s */
  const int32_t *pos;               /* [B, S] */
  const int32_t *first;             /* [B] 0..S */
} kv_new;

/* Attention over [stored | new]. Row t sees every stored slot and the new keys first[b] <= j <= t + S - T; with stop,
 * every row sees first[b] <= j < stop[b]. A row that sees nothing gets out = 0 and lse = its sink, or -inf without a
 * sink. A row whose logits are all -inf gets the same if its values are finite; if not, its out is 0 or NaN. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, T, S, D;
  float scale, softcap;
  const void *q; /* [B, H, T, D] dtype */
  int64_t q_stride[3];
  kv_slots slots;      /* pos unused */
  kv_new chunk;        /* pos unused */
  const int32_t *stop; /* [B] first[b]..S, or NULL: rows are causal */
  const float *sinks;  /* [H] the attention sink: one more logit, without a value (GPT-OSS), or NULL */
  void *out;           /* [B, T, H, D] dtype */
  float *lse;          /* [B, H, T] natural log-sum-exp of the row's logits, including the sink */
  int64_t rows;        /* of the slot buffers; read only on CUDA, as a bound of the work */
} kv_attend;

/* R observing rows and their attention weights over the alive slots, a[r,i] = exp(logit[r,i] - lse[r]) for
 * row_first[b] <= r < R, per query head. causal: the rows are the queries of the last R alive slots, so row r sees slot
 * i iff i <= n - R + r; otherwise it sees all. A row with an lse of -inf sees nothing. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, R, S, D;
  float scale, softcap;
  int causal;
  const void *q; /* [B, H, R, D] dtype */
  int64_t q_stride[3];
  const int32_t *row_first; /* [B] 0..R; with R no row observes and every result is 0 */
  kv_slots slots;           /* pos unused; v only read by kv_error */
  kv_new chunk;             /* pos unused; v only read by kv_error */
  const int32_t *stop;      /* [B] first[b]..S: new keys from here on are not scored and not seen */
  const float *lse;         /* [B, H, R] from kv_attend, or NULL: computed over the slots that the row sees here */
  int64_t lse_stride[2];    /* b, h */
  const float *sinks;       /* [H] or NULL; read only if lse is NULL */
  const float *weight;      /* [B, H, R] the factor of a row's terms, or NULL: 1; not read by kv_peak */
  int64_t weight_stride[2]; /* b, h */
} kv_observers;

/* Importance of every alive slot: weight[r] times a[r,i], a[r,i]^2 or -a[r,i] ln a[r,i] (KV_ENTROPY, 0 for a = 0),
 * reduced over the observing rows (KV_MEAN: divided by their number), then over the G heads of the group. */
typedef struct {
  kv_observers rows;
  int64_t C;
  kv_term term;
  kv_reduce reduce; /* over the rows; KV_MAX allows neither weight nor KV_ENTROPY */
  kv_reduce group;  /* over the heads; KV_NONE: every query head has its own result */
  float *out;       /* [B, Hkv, C], KV_NONE: [B, H, C]; C >= max n; columns from n on are 0 */
} kv_score;

/* The largest a[r,i] over lo[b,h] <= i < hi[b,h]; 0 where a row sees none of them or does not observe. */
typedef struct {
  kv_observers rows;
  const int32_t *lo, *hi; /* [B, Hkv] 0 <= lo <= hi <= n */
  float *out;             /* [B, H, R] */
} kv_peak;

/* Error of the rows' attention outputs o when slot i alone is removed, summed over rows:
 *   KV_EDIE  weight[r] * a / max(1 + alpha - a, 1e-6) * (||v_i||_1 + ||o_r||_1)   EDIE eq. 9-11, a bound if alpha = 0
 *   KV_L1    weight[r] * a / max(1 - a, 1e-6) * ||v_i - o_r||_1                   EDIE eq. 7, in the 1-norm
 *   KV_L2    weight[r] * a / max(1 - a, 1e-6) * ||v_i - o_r||_2                   CAOTE eq. 6, in the 2-norm */
typedef struct {
  kv_observers rows;
  int64_t C;
  kv_error_kind kind;
  kv_reduce group;
  float alpha;         /* >= 0, KV_EDIE only */
  const void *o;       /* [B, R, H, D] dtype, the rows' part of kv_attend's out */
  int64_t o_stride[3]; /* b, r, h */
  float *out;          /* the shape of kv_score's out */
} kv_error;

/* KL divergence from a target to the rows' mean attention, per query head (LookaheadKV eq. 5). With p[i] the mean of
 * a[r,i] over the observing rows and t the target, both divided by their sums over the first min(N, n) alive slots:
 *   loss = sum t[i] ln(t[i] / p[i]), with p at least KV_KL_LEAST before it is divided; 0 where t or p sums to 0. */
#define KV_KL_LEAST 1e-30f
typedef struct {
  kv_observers rows; /* weight and lse are NULL; lse is computed over the slots that the rows see here */
  int64_t N, C;
  const float *target; /* [B, H, N] >= 0 */
  float *loss;         /* [B, H] */
  float *lse;          /* [B, H, R] the rows' log-sum-exp, an input of kv_kl_grad */
  float *mean_attn;    /* [B, H, C] mean attention p, not divided; C >= max n; columns from n on are 0 */
} kv_kl;

/* The gradient of kv_kl's losses, times grad, to the queries and the new keys; stored keys are constants. */
typedef struct {
  kv_observers rows; /* with kv_kl's lse */
  int64_t N, C;
  const float *target, *mean_attn; /* as in kv_kl */
  const float *grad;               /* [B, H] */
  float *dq;                       /* [B, H, R, D] */
  float *dk;                       /* [B, Hkv, S, D]; 0 outside first .. stop - 1 */
} kv_kl_grad;

/* CAOTE (eq. 6-8): from a pooled score h >= 0 the error of the head's output when slot i is removed,
 * hn / (1 - hn) * ||v_i - m||_2 with m = sum hn v, where hn = h / sum h over the head's n alive slots, 1/n if the sum
 * is 0. A slot with hn > 1 - 1e-6 gets FLT_MAX. A NaN among a head's scores makes all its results NaN. */
typedef struct {
  kv_dtype dtype;
  int64_t B, Hkv, S, D, C;
  int fast;            /* m is the unweighted mean of v */
  int squared;         /* the norm is squared */
  const float *score;  /* [B, Hkv, C] h; columns from n on are not read */
  kv_slots slots;      /* k, pos unused */
  kv_new chunk;        /* k, pos unused */
  const int32_t *stop; /* [B] first[b]..S */
  float *out;          /* [B, Hkv, C], columns from n on are 0; may not be score */
} kv_refine;

/* ||x_i||_p of every alive slot, where x are the keys or the values. */
typedef struct {
  kv_dtype dtype;
  int64_t B, Hkv, S, D, C;
  int p;               /* 1 or 2 */
  kv_slots slots;      /* k holds x; v, pos unused */
  kv_new chunk;        /* k holds x; v, pos unused */
  const int32_t *stop; /* [B] first[b]..S */
  float *out;          /* [B, Hkv, C], columns from n on are 0 */
} kv_norm;

/* x_i . (A x_i + b) of every alive slot and every query head, where x are the keys or the values of its kv head:
 * ||W x_i||^2 with A = W^T W, or the exponent of an expected attention weight. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, S, D, C;
  kv_slots slots;           /* k holds x; v, pos unused */
  kv_new chunk;             /* k holds x; v, pos unused */
  const int32_t *stop;      /* [B] first[b]..S */
  const float *matrix;      /* [B, H, D, D] A */
  int64_t matrix_stride[3]; /* b, h, row */
  const float *linear;      /* [B, H, D] b, or NULL: 0 */
  int64_t linear_stride[2]; /* b, h */
  float *out;               /* [B, H, C], columns from n on are 0 */
} kv_quadratic;

/* The keep[b,h] best slots: the first protect_first[b] and the last protect_last[b] alive slots, then by
 * (score descending, slot ascending); NaN ranks below every number. */
typedef struct {
  int64_t B, Hkv, C, K;
  const float *score;           /* [B, Hkv, C]; scores of protected slots are not read */
  const int32_t *n;             /* [B, Hkv] >= 0; may exceed C if the slots beyond C are protected */
  const int32_t *keep;          /* [B, Hkv] min(n, protect_first + protect_last)..min(n, K) */
  const int32_t *protect_first; /* [B] */
  const int32_t *protect_last;  /* [B] */
  int32_t *index;               /* [B, Hkv, K] ascending slot indices; columns from keep on are -1 */
} kv_select;

/* Moves the chosen slots of [src | new] into dst, in order. dst may be src (same buffers, same offsets): with an
 * ascending index no slot is read after it was overwritten. At other offsets of the same buffers, no row of dst may be
 * one of src. A row is packed if only dst is packed, and unpacked if only src is; where both are packed, their kinds
 * must be equal. */
typedef struct {
  kv_dtype dtype;
  int64_t B, Hkv, S, D, K;
  kv_slots src;
  kv_new chunk;
  const int32_t *index; /* [B, Hkv, K] ascending, or NULL: slots 0..keep-1 */
  const int32_t *keep;  /* [B, Hkv] */
  kv_slots dst;         /* len unused */
} kv_compact;

/* One decode step: writes the new key and value after each head's slots, then attends over the prefix's slots and
 * these len + 1. The caller must have made room, and adds 1 to len afterwards. */
typedef struct {
  kv_dtype dtype;
  int64_t B, H, Hkv, D, C;
  float scale, softcap;
  const void *q; /* [B, H, 1, D] dtype */
  int64_t q_stride[3];
  kv_new chunk;   /* S = 1; first unused */
  kv_slots slots; /* written at offset + len */
  /* Slots that come before `slots`, of the same kinds and centre; they are only read, and none of them may be a row
   * that is written. pos and centre unused. All NULL: no prefix. */
  kv_slots prefix;
  const float *sinks; /* [H] or NULL */
  void *out;          /* [B, 1, H, D] dtype */
  float *lse;         /* [B, H, 1] */
  float *probs; /* [B, Hkv, C] the row's attention weights, averaged over the group, 0 after the new slot; or NULL */
  int64_t rows, rows_prefix; /* of the slot buffers; read only on CUDA, as a bound of the work */
} kv_decode;

/* torch's linear, y = x weight^T + bias, of a few rows, on CPUs only. Sums are fp32 and rounded once; a row's sums do
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

/* The lists of ops. Prototypes, the dispatch table and the registration expand X(op, with) for every op. */
#define KV_CPU_OPS(X, with) X(linear, with)
#define KV_OPS(X, with) KV_BOTH_OPS(X, with) KV_CPU_OPS(X, with)
#define KV_BOTH_OPS(X, with) \
  X(attend, with)            \
  X(score, with)             \
  X(peak, with)              \
  X(error, with)             \
  X(kl, with)                \
  X(kl_grad, with)           \
  X(refine, with)            \
  X(norm, with) X(quadratic, with) X(select, with) X(compact, with) X(decode, with)

/* kv_<op>_check checks shapes, dtypes and, with `counts`, the arrays of lengths, counts and indices, which must then be
 * in the CPU's memory. kv_<op>_cpu begins with all of these checks.
 *
 * kv_<op>_cuda runs on the current CUDA device, on `stream` (a cudaStream_t), without waiting for it. Every pointer in
 * the struct is to that device's memory. Every row of q, k, v, o and the slots starts at a multiple of 16 bytes, or of
 * 4 bytes if it is packed. scratch has kv_<op>_cuda_scratch(a) bytes, aligned to 256, with any content. The struct must
 * have passed kv_<op>_check without `counts`; the caller guarantees the counts, since reading them would wait for the
 * device. Returns 0, or the cudaError_t of a launch that failed; kv_cuda_text has its text. */
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

/* Threads. The host program sets how loops run, at any time and from any thread; until it does, they run on the calling
 * thread. body(ctx, begin, end) is called with disjoint ranges that cover 0..n. */
typedef void (*kv_body)(void *ctx, int64_t begin, int64_t end);
typedef void (*kv_parallel)(int64_t n, int64_t grain, kv_body body, void *ctx);
void kv_set_parallel(kv_parallel parallel, int threads);

/* kv_cpu_isas lists the instruction sets of this build in ascending order: "scalar avx2 avx512 avx512bf16 amxbf16" on
 * x86-64, "neon neonbf16" on ARM, else "scalar". kv_cpu_isa names the one that the CPU kernels run with, the highest
 * that the processor has. The environment variable KVEVICT_CPU_ISA, read once, caps the choice. "avx512bf16" is chosen
 * only where the variable names it or where it is faster. If the variable is set to anything else, kv_cpu_isa returns
 * NULL and every op KV_BAD_ISA. */
const char *kv_cpu_isas(void);
const char *kv_cpu_isa(void);

#ifdef __cplusplus
}
#endif
#endif
