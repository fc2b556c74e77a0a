/* The ops of kvevict.h for tests on the CPU: kv_<op>_cpu makes all checks and then runs the CUDA kernels on the
 * emulator, with threads and blocks in ascending order and again in a random order, which must give the same bits. */
#include <stdio.h>
#include <stdlib.h>

#include <initializer_list>
#include <vector>

#include "kvevict.h"
#include "ptx.h"

namespace {
struct Result {
  void *data;
  int64_t bytes;
};
using Results = std::initializer_list<Result>;

std::vector<unsigned char> bits_of(Results results) {
  std::vector<unsigned char> bits;
  for (const Result &r : results)
    if (r.bytes > 0 && r.data)
      bits.insert(bits.end(), static_cast<unsigned char *>(r.data), static_cast<unsigned char *>(r.data) + r.bytes);
  return bits;
}

/* No kv_status stands for these errors, so the process ends. */
[[noreturn]] void stop(const char *op, const char *why) {
  fprintf(stderr, "kv_%s_cuda: %s\n", op, why);
  abort();
}

/* call(scratch), where scratch has exactly the size asked for and holds NaN. */
template <class Call>
void run(const char *op, unsigned seed, int64_t scratch_bytes, Call call) {
  void *scratch = nullptr;
  if (scratch_bytes < 0 || posix_memalign(&scratch, 256, (size_t)scratch_bytes)) stop(op, "bad amount of scratch");
  memset(scratch, 0xff, (size_t)scratch_bytes);
  emulator::set_order(seed);
  const int error = call(scratch);
  if (error) stop(op, kv_cuda_text(error));
  free(scratch);
}

/* A line for usage.py. */
void write_usage(const char *op) {
  const char *name = getenv("KV_ON_CPU_USAGE");
  FILE *file = name ? fopen(name, "a") : nullptr;
  if (!file) return;
  fprintf(file, "%s %zu %ld %ld\n", op, emulator::usage.shared, emulator::usage.matrices, emulator::usage.conflicts);
  fclose(file);
}

/* results: the memory that the op writes; none if a second run would not write the same. */
template <class Call>
kv_status tested(const char *op, kv_status status, int64_t scratch_bytes, Results results, Call call) {
  static unsigned calls;
  if (status != KV_OK) return status;
  const unsigned seed = ++calls;
  emulator::usage = {};
  run(op, results.size() ? 0 : seed, scratch_bytes, call);
  write_usage(op);
  if (!results.size()) return KV_OK;
  const auto first = bits_of(results);
  for (const Result &r : results)
    if (r.data && r.bytes > 0) memset(r.data, 0xff, (size_t)r.bytes);
  run(op, seed, scratch_bytes, call);
  if (bits_of(results) != first) stop(op, "another order of threads gives another result");
  return KV_OK;
}

int64_t size_of(kv_dtype dtype) { return dtype == KV_F32 ? 4 : 2; }
int64_t heads_out(const kv_observers &rows, kv_reduce group) { return rows.B * (group == KV_NONE ? rows.H : rows.Hkv); }
}  // namespace

#define KV_OP(op, ...)                                                                 \
  kv_status kv_##op##_cpu(const kv_##op *a) {                                          \
    const kv_status status = kv_##op##_check(a, 1);                                    \
    return tested(#op, status, status ? 0 : kv_##op##_cuda_scratch(a), __VA_ARGS__,    \
                  [=](void *scratch) { return kv_##op##_cuda(a, scratch, nullptr); }); \
  }
#define KV_RESULTS(...) Results({__VA_ARGS__})
#define KV_ATTENDED                                                                                  \
  {a->attend.out, a->attend.B * a->attend.T * a->attend.H * a->attend.D * size_of(a->attend.dtype)}, \
      {a->attend.lse, a->attend.B * a->attend.H * a->attend.T * 4}

extern "C" {
KV_OP(attend, KV_RESULTS({a->out, a->B * a->T * a->H * a->D *size_of(a->dtype)}, {a->lse, a->B * a->H * a->T * 4}))
KV_OP(score, KV_RESULTS({a->out, heads_out(a->rows, a->group) * a->C * 4}))
KV_OP(peak, KV_RESULTS({a->out, a->rows.B * a->rows.H * a->rows.R * 4}))
KV_OP(error, KV_RESULTS({a->out, heads_out(a->rows, a->group) * a->C * 4}))
KV_OP(attend_score, KV_RESULTS(KV_ATTENDED, {a->score.out, heads_out(a->score.rows, a->score.group) * a->score.C * 4}))
KV_OP(attend_error, KV_RESULTS(KV_ATTENDED, {a->error.out, heads_out(a->error.rows, a->error.group) * a->error.C * 4}))
KV_OP(attend_peak, KV_RESULTS(KV_ATTENDED, {a->peak.out, a->attend.B * a->attend.H * a->peak.rows.R * 4}))
KV_OP(probe, KV_RESULTS({a->out, a->B * a->H * a->R * a->D * 4}))
KV_OP(kl, KV_RESULTS({a->loss, a->rows.B * a->rows.H * 4}, {a->lse, a->rows.B * a->rows.H * a->rows.R * 4},
                     {a->mean_attn, a->rows.B * a->rows.H * a->C * 4}))
KV_OP(kl_grad, KV_RESULTS({a->dq, a->rows.B * a->rows.H * a->rows.R * a->rows.D * 4},
                          {a->dk, a->rows.B * a->rows.Hkv * a->rows.S * a->rows.D * 4}))
KV_OP(refine, KV_RESULTS({a->out, a->B * a->Hkv * a->C * 4}))
KV_OP(norm, KV_RESULTS({a->out, a->B * a->Hkv * a->C * 4}))
KV_OP(quadratic, KV_RESULTS({a->out, a->B * a->H * a->C * 4}))
KV_OP(select, KV_RESULTS({a->index, a->B * a->Hkv * a->K * 4}))
KV_OP(compact, KV_RESULTS())
KV_OP(decode, KV_RESULTS({a->out, a->B * a->H * a->D *size_of(a->dtype)}, {a->lse, a->B * a->H * 4},
                         {a->probs, a->B * a->Hkv * a->C * 4}))

kv_status kv_linear_cpu(const kv_linear *) { return KV_BAD_ISA; } /* it has no CUDA kernel */

const char *kv_cpu_isa(void) { return "CUDA on a CPU"; }
const char *kv_cpu_isas(void) { return kv_cpu_isa(); }
void kv_set_parallel(kv_parallel, int) {}
}
