/* Where the public CPU functions lead: arguments are checked once, then the kernels of the best instruction set run.
 * Also the thread hook. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "parallel.h"

/* The kernels of one instruction set. */
typedef struct {
  const char *name;
#define KV_FIELD(op, isa) kv_status (*op)(const kv_##op *);
  KV_OPS(KV_FIELD, )
} kv_kernels;

#define KV_PROTOTYPE(op, isa) kv_status kv_##op##_##isa(const kv_##op *a);
#define KV_ENTRY(op, isa) kv_##op##_##isa,
#define KV_KERNELS(isa)     \
  KV_OPS(KV_PROTOTYPE, isa) \
  static const kv_kernels kv_kernels_##isa = {#isa, KV_OPS(KV_ENTRY, isa)};

KV_KERNELS(scalar)
#if defined(__x86_64__)
KV_KERNELS(avx2)
KV_KERNELS(avx512)
KV_KERNELS(avx512bf16)
#endif

/* The fastest table that the processor has and KVEVICT_CPU_ISA allows. Products of bf16 (vdpbf16ps) run at twice the rate
 * of fp32's on AMD's processors, but at half of it on Intel's: there they are only taken if asked for by name. */
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
  const int wanted = cap ? strcmp(cap, "avx512bf16") == 0 : __builtin_cpu_is("amd");
  return wanted && __builtin_cpu_supports("avx512bf16") ? &kv_kernels_avx512bf16 : &kv_kernels_avx512;
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

#define KV_DISPATCH(op, isa)                             \
  kv_status kv_##op##_cpu(const kv_##op *a) {            \
    const kv_status status = kv_##op##_check(a, 1);      \
    return status ? status : kv_kernels_chosen()->op(a); \
  }
KV_OPS(KV_DISPATCH, )
