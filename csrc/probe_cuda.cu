/* The exponential average of a probe's queries over chunks, on a GPU, limited by memory bandwidth.
 *
 * budget: regs 40, smem 0 (registers of a thread, bytes of a block) */
#include "launch.cuh"
#include "vector.cuh"

constexpr int THREADS = 256;

/* A thread computes one number. Products and sums are rounded one by one, as torch rounds them. */
template <class E>
static __global__ void __launch_bounds__(THREADS) probe_kernel(const kv_probe a) {
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, row = i / a.D;
  if (row >= a.B * a.H * a.R) return;
  const int d = (int)(i % a.D);
  const int64_t b = row / a.R / a.H, h = row / a.R % a.H, r = row % a.R;
  const float q = to_float(static_cast<const E *>(a.q)[b * a.q_stride[0] + h * a.q_stride[1] + r * a.q_stride[2] + d]);
  float before = a.past[i];
  if (a.cos) {
    const float other = a.past[row * a.D + a.partner[d]];
    before = __fadd_rn(__fmul_rn(before, a.cos[b * a.D + d]), __fmul_rn(other, a.sin[b * a.D + d]));
  }
  const float keep = a.decay[b];
  a.out[i] = __fadd_rn(__fmul_rn(keep, before), __fmul_rn(1 - keep, q));
}

int64_t kv_probe_cuda_scratch(const kv_probe *) { return 0; }

int kv_probe_cuda(const kv_probe *a, void *, void *stream) {
  const int64_t count = a->B * a->H * a->R * a->D;
  if (count == 0) return 0;
  return dispatch(a->dtype, [&](auto e) {
    return launch<probe_kernel<decltype(e)>>(dim3((unsigned)((count + THREADS - 1) / THREADS)), THREADS, 0, stream, *a);
  });
}
