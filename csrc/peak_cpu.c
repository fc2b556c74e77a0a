/* Each observing row's largest attention weight within a range of slots, on a CPU (peak.h). */
#include "peak.h"

kv_status KV_OP(peak)(const kv_peak *a) { return kv_peak_rows(a); }
