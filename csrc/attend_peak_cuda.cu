/* attend with its last rows' largest attention weights within a range of slots, on a GPU: the kernels of attend, then
 * those of peak in the same call. */
// budget: regs 0, smem 0 (it has no kernel of its own)
#include "kvevict.h"

static kv_peak peak_of(const kv_attend_peak *a) {
  kv_peak peak = a->peak;
  kv_last_rows(&a->attend, &peak.rows);
  return peak;
}

int64_t kv_attend_peak_cuda_scratch(const kv_attend_peak *a) {
  const kv_peak peak = peak_of(a);
  const int64_t one = kv_attend_cuda_scratch(&a->attend), other = kv_peak_cuda_scratch(&peak);
  return one > other ? one : other;
}

int kv_attend_peak_cuda(const kv_attend_peak *a, void *scratch, void *stream) {
  const kv_peak peak = peak_of(a);
  const int failed = kv_attend_cuda(&a->attend, scratch, stream);
  return failed ? failed : kv_peak_cuda(&peak, scratch, stream);
}
