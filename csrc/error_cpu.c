/* Error of the observing rows' attention outputs when one alive slot is removed, on a CPU (error.h). */
#include "error.h"

kv_status KV_OP(error)(const kv_error *a) {
  const kv_reduction how = kv_error_how(a);
  return kv_reduce_rows(&a->rows, a, &how);
}
