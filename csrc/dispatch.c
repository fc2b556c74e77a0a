/* The public CPU functions, which check arguments and run the best instruction set's kernels; and the hook through
 * which the host program runs loops on threads. */
#define _DEFAULT_SOURCE /* declares syscall() */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "parallel.h"

/* The kernels of one instruction set: one function per op. */
typedef struct {
  const char *name;
#define KV_FIELD(op, isa) kv_status (*op)(const kv_##op *);
  KV_OPS(KV_FIELD, )
} kv_kernels;

/* The instruction sets of this build in ascending order, and whether the processor has each. */
#if defined(__x86_64__)
#define KV_ISAS(X) X(scalar) X(avx2) X(avx512) X(avx512bf16) X(amxbf16)
static int kv_has_scalar(void) { return 1; }
static int kv_has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static int kv_has_avx512(void) {
  return kv_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static int kv_has_avx512bf16(void) {
  return kv_has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
static int kv_has_amxbf16(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
  /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: a process must ask Linux for tile registers */
  enum { ASK = 0x1023, TILES = 18 };
  unsigned a, b, c, d;
  return kv_has_avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1 &&
         syscall(SYS_arch_prctl, ASK, TILES) == 0;
#else
  return 0;
#endif
}
#elif defined(__aarch64__)
#define KV_ISAS(X) X(neon) X(neonbf16)
static int kv_has_neon(void) { return 1; }
static int kv_has_neonbf16(void) {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) >> 14 & 1; /* the bit HWCAP2_BF16, which old headers do not define */
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, NULL, 0) == 0 && has;
#else
  return 0;
#endif
}
#else
#define KV_ISAS(X) X(scalar)
static int kv_has_scalar(void) { return 1; }
#endif

#define KV_PROTOTYPE(op, isa) kv_status kv_##op##_##isa(const kv_##op *a);
#define KV_ENTRY(op, isa) kv_##op##_##isa,
#define KV_KERNELS(isa)     \
  KV_OPS(KV_PROTOTYPE, isa) \
  static const kv_kernels kv_kernels_##isa = {#isa, KV_OPS(KV_ENTRY, isa)};
KV_ISAS(KV_KERNELS)

#define KV_CHOICE(isa) {&kv_kernels_##isa, kv_has_##isa},
static const struct {
  const kv_kernels *kernels;
  int (*has)(void);
} kv_choices[] = {KV_ISAS(KV_CHOICE)};

#define KV_NAME(isa) " " #isa
const char *kv_cpu_isas(void) { return &KV_ISAS(KV_NAME)[1]; }

/* Returns whether the instruction set is faster than the next lower one. Products of bf16 (vdpbf16ps) run at twice the
 * rate of fp32's on AMD's processors and at half of it on Intel's. */
static int kv_is_faster(const char *name) {
#if defined(__x86_64__)
  return strcmp(name, "avx512bf16") != 0 || __builtin_cpu_is("amd");
#else
  return name != NULL;
#endif
}

/* Returns the kernels of the highest instruction set that the processor has, that is faster than the next lower one and
 * that is not above the one in KVEVICT_CPU_ISA. The set that the variable names is taken even if it is not faster.
 * Returns NULL if the variable names no set of this build. */
static const kv_kernels *kv_kernels_best(void) {
  enum { COUNT = sizeof kv_choices / sizeof *kv_choices };
  const char *cap = getenv("KVEVICT_CPU_ISA");
  int most = COUNT - 1, i;
  if (cap && *cap)
    for (most = 0; strcmp(cap, kv_choices[most].kernels->name) != 0;)
      if (++most == COUNT) return NULL;
  for (i = most; i > 0; i--) {
    const int named = cap && *cap && i == most;
    if (kv_choices[i].has() && (named || kv_is_faster(kv_choices[i].kernels->name))) break;
  }
  return kv_choices[i].kernels;
}

/* Returns the kernels to run, which the first call chooses. Threads that call this first at the same time choose the
 * same. */
static const kv_kernels *kv_kernels_chosen(void) {
  static _Atomic(const kv_kernels *) chosen;
  const kv_kernels *x = atomic_load(&chosen);
  if (!x) atomic_store(&chosen, x = kv_kernels_best());
  return x;
}

const char *kv_cpu_isa(void) {
  const kv_kernels *x = kv_kernels_chosen();
  return x ? x->name : NULL;
}

/* The host's hook and its number of threads. Any thread may set them while others run ops: a loop reads each of the two
 * once, and any hook works with any number of threads. */
static _Atomic(kv_parallel) kv_hook;
static atomic_int kv_hook_threads = 1;

/* binding.cpp calls this before every op. A value that is already set is only read, so concurrent callers share its
 * cache line. */
void kv_set_parallel(kv_parallel parallel, int threads) {
  const int wanted = parallel && threads > 1 ? threads : 1;
  if (atomic_load(&kv_hook) != parallel) atomic_store(&kv_hook, parallel);
  if (atomic_load(&kv_hook_threads) != wanted) atomic_store(&kv_hook_threads, wanted);
}

int kv_threads(void) { return atomic_load(&kv_hook_threads); }

/* A loop over items 0 .. n - 1, handed out in ranges of `grain` items. No worker has taken items from `next` on. */
typedef struct {
  atomic_int_least64_t next;
  int64_t n, grain;
  kv_body body;
  void *ctx;
} kv_queue;

/* Takes and runs ranges of the loop until none is left. begin and end are ignored: if the hook runs several workers in
 * one call, that call runs all ranges. */
static void kv_worker(void *ctx, int64_t begin, int64_t end) {
  kv_queue *queue = ctx;
  (void)begin, (void)end;
  for (int64_t at; (at = atomic_fetch_add(&queue->next, queue->grain)) < queue->n;)
    queue->body(queue->ctx, at, queue->n - at < queue->grain ? queue->n : at + queue->grain);
}

void kv_parallel_for(int64_t n, int64_t grain, kv_body body, void *ctx) {
  if (n <= 0) return;
  const kv_parallel hook = atomic_load(&kv_hook);
  const int64_t ranges = (n + grain - 1) / grain, threads = kv_threads(), workers = ranges < threads ? ranges : threads;
  kv_queue queue = {0, n, grain, body, ctx};
  if (!hook || workers <= 1)
    body(ctx, 0, n);
  else
    hook(workers, 1, kv_worker, &queue);
}

#define KV_DISPATCH(op, isa)                            \
  kv_status kv_##op##_cpu(const kv_##op *a) {           \
    const kv_status status = kv_##op##_check(a, 1);     \
    const kv_kernels *x = kv_kernels_chosen();          \
    return status ? status : x ? x->op(a) : KV_BAD_ISA; \
  }
KV_OPS(KV_DISPATCH, )
