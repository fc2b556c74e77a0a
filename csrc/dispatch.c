/* Where the public CPU functions lead: arguments are checked once, then the kernels of the best instruction set run.
 * Also the thread hook. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "parallel.h"

typedef struct {
  const char *name;
  kv_status (*attend)(const kv_attend *);
  kv_status (*score)(const kv_score *);
  kv_status (*peak)(const kv_peak *);
  kv_status (*error)(const kv_error *);
  kv_status (*refine)(const kv_refine *);
  kv_status (*norm)(const kv_norm *);
  kv_status (*decode)(const kv_decode *);
} kv_kernels;

#define KV_KERNELS(isa)                                                                                       \
  kv_status kv_attend_##isa(const kv_attend *a);                                                              \
  kv_status kv_score_##isa(const kv_score *a);                                                                \
  kv_status kv_peak_##isa(const kv_peak *a);                                                                  \
  kv_status kv_error_##isa(const kv_error *a);                                                                \
  kv_status kv_refine_##isa(const kv_refine *a);                                                              \
  kv_status kv_norm_##isa(const kv_norm *a);                                                                  \
  kv_status kv_decode_##isa(const kv_decode *a);                                                              \
  static const kv_kernels kv_kernels_##isa = {#isa,           kv_attend_##isa, kv_score_##isa, kv_peak_##isa, \
                                              kv_error_##isa, kv_refine_##isa, kv_norm_##isa,  kv_decode_##isa};

KV_KERNELS(scalar)
#if defined(__x86_64__)
KV_KERNELS(avx2)
KV_KERNELS(avx512)
#endif

/* The best table that the processor has and KVEVICT_CPU_ISA allows. */
static const kv_kernels *kv_kernels_best(void) {
#if defined(__x86_64__)
  const char *cap = getenv("KVEVICT_CPU_ISA");
  if (cap && strcmp(cap, "scalar") == 0) return &kv_kernels_scalar;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return &kv_kernels_scalar;
  if (cap && strcmp(cap, "avx2") == 0) return &kv_kernels_avx2;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return &kv_kernels_avx2;
  return &kv_kernels_avx512;
#else
  return &kv_kernels_scalar;
#endif
}

/* Chosen once; two threads that come first together choose the same. */
static const kv_kernels *kv_kernels_chosen(void) {
  static _Atomic(const kv_kernels *) chosen;
  const kv_kernels *x = atomic_load(&chosen);
  if (!x) atomic_store(&chosen, x = kv_kernels_best());
  return x;
}

const char *kv_cpu_isa(void) { return kv_kernels_chosen()->name; }

static kv_parallel kv_hook;
static int kv_hook_threads = 1;

void kv_set_parallel(kv_parallel parallel, int threads) {
  kv_hook = parallel;
  kv_hook_threads = parallel && threads > 1 ? threads : 1;
}

int kv_threads(void) { return kv_hook_threads; }

/* The ranges of one loop that nobody has taken yet start at `next`. */
typedef struct {
  atomic_int_least64_t next;
  int64_t n, grain;
  kv_body body;
  void *ctx;
} kv_queue;

/* However many of its workers the host runs in one call, the first empties the queue for all of them. */
static void kv_worker(void *ctx, int64_t begin, int64_t end) {
  kv_queue *queue = ctx;
  (void)begin, (void)end;
  for (int64_t at; (at = atomic_fetch_add(&queue->next, queue->grain)) < queue->n;)
    queue->body(queue->ctx, at, queue->n - at < queue->grain ? queue->n : at + queue->grain);
}

void kv_parallel_for(int64_t n, int64_t grain, kv_body body, void *ctx) {
  if (n <= 0) return;
  const int64_t ranges = (n + grain - 1) / grain, workers = ranges < kv_hook_threads ? ranges : kv_hook_threads;
  kv_queue queue = {0, n, grain, body, ctx};
  if (workers <= 1)
    body(ctx, 0, n);
  else
    kv_hook(workers, 1, kv_worker, &queue);
}

const char *kv_status_text(kv_status status) {
  switch (status) {
    case KV_OK:
      return "ok";
    case KV_BAD_SHAPE:
      return "bad shape: dimensions >= 0, H a multiple of Hkv, D a multiple of 8 in 8..256";
    case KV_BAD_DTYPE:
      return "bad dtype, kind or reduction";
    case KV_BAD_COUNT:
      return "bad count: keep, len, first, stop, lo, hi or an index is outside what is alive";
    case KV_NO_MEMORY:
      return "no memory for scratch";
  }
  return "unknown status";
}

static int kv_bad_heads(int64_t B, int64_t H, int64_t Hkv, int64_t D) {
  if (B < 0 || H < 0 || Hkv < 0 || D < 8 || D > 256 || D % 8) return 1;
  return Hkv == 0 ? H != 0 : H == 0 || H % Hkv;
}

static int kv_bad_dtype(kv_dtype dtype) { return dtype != KV_F32 && dtype != KV_F16 && dtype != KV_BF16; }

/* Whether any of x[0..n-1] is outside 0..most. */
static int kv_outside(const int32_t *x, int64_t n, int64_t most) {
  int bad = 0;
  for (int64_t i = 0; i < n; i++) bad |= x[i] < 0 || x[i] > most;
  return bad;
}

kv_status kv_attend_cpu(const kv_attend *a) {
  if (kv_bad_heads(a->B, a->H, a->Hkv, a->D) || a->T < 0 || a->S < 0) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype)) return KV_BAD_DTYPE;
  if (kv_outside(a->slots.len, a->B * a->Hkv, INT32_MAX) || kv_outside(a->fresh.first, a->B, a->S)) return KV_BAD_COUNT;
  return kv_kernels_chosen()->attend(a);
}

/* Whether the alive slots of a head, the new ones up to stop, are fewer than none or more than C. */
static int kv_bad_alive(const kv_slots *slots, const kv_new *fresh, const int32_t *stop, int64_t B, int64_t Hkv,
                        int64_t S, int64_t C) {
  if (kv_outside(slots->len, B * Hkv, C) || kv_outside(fresh->first, B, S) || kv_outside(stop, B, S)) return 1;
  for (int64_t i = 0; i < B * Hkv; i++) {
    const int64_t b = i / Hkv, count = (int64_t)stop[b] - fresh->first[b];
    if (count < 0 || slots->len[i] + count > C) return 1;
  }
  return 0;
}

static kv_status kv_check_observers(const kv_observers *a, int64_t C) {
  if (kv_bad_heads(a->B, a->H, a->Hkv, a->D) || a->R < 0 || a->S < 0 || C < 0) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype)) return KV_BAD_DTYPE;
  if (kv_bad_alive(&a->slots, &a->fresh, a->stop, a->B, a->Hkv, a->S, C)) return KV_BAD_COUNT;
  return kv_outside(a->row_first, a->B, a->R) ? KV_BAD_COUNT : KV_OK;
}

static int kv_bad_reduce(kv_reduce reduce) { return reduce != KV_SUM && reduce != KV_MEAN && reduce != KV_MAX; }

kv_status kv_score_cpu(const kv_score *a) {
  const kv_status status = kv_check_observers(&a->rows, a->C);
  if (status != KV_OK) return status;
  if (kv_bad_reduce(a->reduce) || (kv_bad_reduce(a->group) && a->group != KV_NONE)) return KV_BAD_DTYPE;
  if (a->term != KV_A && a->term != KV_SQUARE && a->term != KV_ENTROPY) return KV_BAD_DTYPE;
  if (a->reduce == KV_MAX && (a->rows.weight || a->term == KV_ENTROPY)) return KV_BAD_DTYPE;
  return kv_kernels_chosen()->score(a);
}

kv_status kv_peak_cpu(const kv_peak *a) {
  const kv_observers *x = &a->rows;
  const kv_status status = kv_check_observers(x, INT32_MAX);
  if (status != KV_OK) return status;
  for (int64_t i = 0; i < x->B * x->Hkv; i++) {
    const int64_t b = i / x->Hkv, n = (int64_t)x->slots.len[i] + x->stop[b] - x->fresh.first[b];
    if (a->lo[i] < 0 || a->lo[i] > a->hi[i] || a->hi[i] > n) return KV_BAD_COUNT;
  }
  return kv_kernels_chosen()->peak(a);
}

kv_status kv_error_cpu(const kv_error *a) {
  const kv_status status = kv_check_observers(&a->rows, a->C);
  if (status != KV_OK) return status;
  if (kv_bad_reduce(a->group) && a->group != KV_NONE) return KV_BAD_DTYPE;
  if (a->kind != KV_EDIE && a->kind != KV_L1 && a->kind != KV_L2) return KV_BAD_DTYPE;
  return kv_kernels_chosen()->error(a);
}

kv_status kv_refine_cpu(const kv_refine *a) {
  if (kv_bad_heads(a->B, a->Hkv, a->Hkv, a->D) || a->S < 0 || a->C < 0) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype)) return KV_BAD_DTYPE;
  if (kv_bad_alive(&a->slots, &a->fresh, a->stop, a->B, a->Hkv, a->S, a->C)) return KV_BAD_COUNT;
  return kv_kernels_chosen()->refine(a);
}

kv_status kv_norm_cpu(const kv_norm *a) {
  if (kv_bad_heads(a->B, a->Hkv, a->Hkv, a->D) || a->S < 0 || a->C < 0) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype) || (a->p != 1 && a->p != 2)) return KV_BAD_DTYPE;
  if (kv_bad_alive(&a->slots, &a->fresh, a->stop, a->B, a->Hkv, a->S, a->C)) return KV_BAD_COUNT;
  return kv_kernels_chosen()->norm(a);
}

kv_status kv_decode_cpu(const kv_decode *a) {
  if (kv_bad_heads(a->B, a->H, a->Hkv, a->D) || a->C < 0) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype)) return KV_BAD_DTYPE;
  if (kv_outside(a->slots.len, a->B * a->Hkv, a->probs ? a->C - 1 : INT32_MAX)) return KV_BAD_COUNT;
  return kv_kernels_chosen()->decode(a);
}
