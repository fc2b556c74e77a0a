/* attend with the errors of its last rows' outputs when one slot is removed, on a GPU: the kernels of attend, then
 * those of error in the same call. */
// budget: regs 0, smem 0 (it has no kernel of its own)
#include "kvevict.h"

int64_t kv_attend_error_cuda_scratch(const kv_attend_error *a) { return kv_attend_cuda_scratch(&a->attend); }

int kv_attend_error_cuda(const kv_attend_error *a, void *scratch, void *stream) {
  kv_error error = a->error;
  kv_last_rows(&a->attend, &error.rows);
  kv_last_outputs(&a->attend, &error);
  const int failed = kv_attend_cuda(&a->attend, scratch, stream);
  return failed ? failed : kv_error_cuda(&error, nullptr, stream);
}
