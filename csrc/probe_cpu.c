/* The exponential average of a probe's queries over chunks, on a CPU. */
#include "half.h"
#include "parallel.h"
#include "simd.h"

/* Products and sums are rounded one by one, as torch rounds them. */
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

static void kv_probe_body(void *ctx, int64_t begin, int64_t end) {
  const kv_probe *a = ctx;
  const int64_t D = a->D;
  float q[KV_MOST_D];
  for (int64_t i = begin; i < end; i++) {
    const int64_t b = i / a->R / a->H, h = i / a->R % a->H, r = i % a->R;
    const int64_t at = b * a->q_stride[0] + h * a->q_stride[1] + r * a->q_stride[2];
    const float *past = a->past + i * D, keep = a->decay[b], own = 1 - keep;
    kv_load_row(a->dtype, (const char *)a->q + at * kv_size(a->dtype), q, D);
    for (int64_t d = 0; d < D; d++) {
      float before = past[d];
      if (a->cos) before = before * a->cos[b * D + d] + past[a->partner[d]] * a->sin[b * D + d];
      a->out[i * D + d] = keep * before + own * q[d];
    }
  }
}

kv_status KV_OP(probe)(const kv_probe *a) {
  kv_parallel_for(a->B * a->H * a->R, 64, kv_probe_body, (void *)a);
  return KV_OK;
}
