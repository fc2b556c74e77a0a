/* Small kernels, each correct unless `broken`, and then wrong in one way that the emulator must catch. Each reverses
 * 128 numbers, y[i] = x[127 - i], with one block of 128 threads unless its comment has other blocks.
 *   broken NAME right|broken [SEED]   exits with 0 if y is as it should be, 1 if not, 2 if the launch failed */
#include <stdio.h>
#include <stdlib.h>

#include "launch.cuh"
#include "warp.cuh"

constexpr int N = 128;

#define KERNEL           \
  template <bool broken> \
  static __global__ void
#define ARGUMENTS (const float *x, float *y)

KERNEL missing_barrier ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  s[t] = x[t];
  if (!broken) __syncthreads();
  y[t] = s[N - 1 - t];
}

KERNEL missing_warp_barrier ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  s[t] = x[N - 1 - (t ^ 31)];
  if (!broken) __syncwarp();
  y[t] = s[t ^ 31];
}

/* Broken, it is still correct if the threads run in order. */
KERNEL two_writers ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  if (broken || t == N - 1) s[0] = x[t];
  __syncthreads();
  y[t] = x[N - 1 - t] + s[0] - x[N - 1];
}

KERNEL never_written ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  if (!broken) s[t] = 0;
  y[t] = x[N - 1 - t] + s[t];
}

/* A sum that depends on the order: 2^24 + 1 = 2^24 in fp32. */
KERNEL order_of_sum ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  const float term = t == 0 ? 0x1p24f : 1.0f;
  if (t == 0) s[0] = broken ? 0.0f : 0x1p24f;
  __syncthreads();
  if (broken) atomicAdd(s, term);
  __syncthreads();
  y[t] = x[N - 1 - t] + (s[0] - 0x1p24f);
}

KERNEL some_skip_barrier ARGUMENTS {
  const int t = threadIdx.x;
  y[t] = x[N - 1 - t];
  if (!broken || t < 64) __syncthreads();
}

KERNEL some_return ARGUMENTS {
  const int t = threadIdx.x;
  y[t] = x[N - 1 - t];
  if (broken && t >= 64) return;
  __syncthreads();
}

KERNEL different_barriers ARGUMENTS {
  const int t = threadIdx.x;
  y[t] = x[N - 1 - t];
  if (broken && t < 64)
    __syncthreads();
  else
    __syncthreads();
}

KERNEL some_lanes_shuffle ARGUMENTS {
  const int t = threadIdx.x;
  float value = x[N - 1 - t];
  if (!broken || t % 32 < 16) value = __shfl_xor_sync(ALL_LANES, __shfl_xor_sync(ALL_LANES, value, 1), 1);
  y[t] = value;
}

KERNEL different_shuffles ARGUMENTS {
  const int t = threadIdx.x;
  float value = x[N - 1 - t];
  if (broken && t % 32 < 16)
    value = __shfl_sync(ALL_LANES, value, t % 32);
  else
    value = __shfl_sync(ALL_LANES, value, t % 32);
  y[t] = value;
}

KERNEL shuffle_mask ARGUMENTS {
  const int t = threadIdx.x;
  y[t] = __shfl_sync(broken ? 0xffffu : ALL_LANES, x[N - 1 - t], t % 32);
}

/* Threads 0..31 copy 4 numbers each. */
static __device__ void fetch(float *s, const float *x) {
  if (threadIdx.x < N / 4) cp_async_16(s + 4 * threadIdx.x, x + 4 * threadIdx.x);
}

KERNEL missing_wait ARGUMENTS {
  float *s = shared_memory<float>();
  fetch(s, x);
  cp_async_commit();
  if (!broken) cp_async_wait<0>();
  __syncthreads();
  y[threadIdx.x] = s[N - 1 - threadIdx.x];
}

KERNEL wait_for_too_few ARGUMENTS {
  float *s = shared_memory<float>();
  fetch(s, x);
  cp_async_commit();
  cp_async_wait<broken ? 1 : 0>();
  __syncthreads();
  y[threadIdx.x] = s[N - 1 - threadIdx.x];
}

KERNEL missing_commit ARGUMENTS {
  float *s = shared_memory<float>();
  fetch(s, x);
  if (!broken) cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  y[threadIdx.x] = s[N - 1 - threadIdx.x];
}

/* cp_async_wait waits only for the calling thread's copies. */
KERNEL wait_without_barrier ARGUMENTS {
  float *s = shared_memory<float>();
  fetch(s, x);
  cp_async_commit();
  cp_async_wait<0>();
  if (!broken) __syncthreads();
  y[threadIdx.x] = s[N - 1 - threadIdx.x];
}

KERNEL refill_too_early ARGUMENTS {
  float *s = shared_memory<float>();
  fetch(s, x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const float value = s[N - 1 - threadIdx.x];
  if (!broken) __syncthreads();
  if (threadIdx.x < N / 4) cp_async_16(s + 4 * threadIdx.x, x, 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  y[threadIdx.x] = value + s[threadIdx.x];
}

KERNEL source_changes ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  y[t] = x[t];
  __syncthreads();
  fetch(s, y);
  cp_async_commit();
  if (broken && t == 3) y[t] = 0;
  cp_async_wait<0>();
  __syncthreads();
  y[t] = s[N - 1 - t];
}

KERNEL writes_past_shared ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  s[t + (broken ? 1 : 0)] = 0;
  y[t] = x[N - 1 - t];
}

KERNEL reads_past_global ARGUMENTS {
  const int t = threadIdx.x;
  y[t] = x[N - 1 - t] + 0.0f * x[t + (broken ? 1 : 0)];
}

KERNEL copies_past_global ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  if (t < N / 4) cp_async_16(s + 4 * t, x + 4 * t + (broken ? 4 : 0));
  cp_async_commit();
  cp_async_wait<0>();
  y[t] = x[N - 1 - t];
}

KERNEL misaligned_vector ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  s[t] = 0;
  __syncthreads();
  y[t] = x[N - 1 - t] + reinterpret_cast<const float2 *>(s + (broken ? 1 : 0))[t % 32].x;
}

KERNEL misaligned_copy ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x;
  if (t < 4) cp_async_16(s + 4 * t + (broken ? 2 : 0), x + 4 * t);
  y[t] = x[N - 1 - t];
}

KERNEL misaligned_matrix ARGUMENTS {
  uint16_t *s = shared_memory<uint16_t>();
  uint32_t r[4];
  s[threadIdx.x] = 0;
  __syncthreads();
  ldmatrix_x4(r[0], r[1], r[2], r[3], s + threadIdx.x % 8 * 8 + (broken ? 4 : 0));
  y[threadIdx.x] = x[N - 1 - threadIdx.x] + (float)r[0];
}

/* y [16, 8] = J x J' by one product of 16x16 and 16x8: A[i, 15 - i] = 1, or 2 in the lower half, B[i, j] = x[i, 7 - j].
 * fault: 1 the halves of B, 2 those of A exchanged, 3 B not transposed, 4 the lower half of D written to the upper. */
template <int fault, class E>
static __device__ void product(const float *x, float *y) {
  struct Shared {
    E a[16][16], b[16][8];
  };
  Shared *s = shared_memory<Shared>();
  const int t = threadIdx.x, lane = lane_id(), g = lane / 4, c = lane % 4 * 2;
  for (int i = t; i < 256; i += N)
    s->a[i / 16][i % 16] = from_float<E>(i % 16 != 15 - i / 16 ? 0.0f : i < 128 ? 1.0f : 2.0f);
  s->b[t / 8][t % 8] = from_float<E>(x[t / 8 * 8 + 7 - t % 8]);
  __syncthreads();
  uint32_t a[4], b0, b1, again[2]; /* b has two matrices of the four that ldmatrix reads */
  ldmatrix_x4(a[0], a[fault == 2 ? 2 : 1], a[fault == 2 ? 1 : 2], a[3], &s->a[lane % 16][lane / 16 * 8]);
  if (fault == 3)
    ldmatrix_x4(b0, b1, again[0], again[1], s->b[lane % 16]);
  else
    ldmatrix_x4_trans(b0, b1, again[0], again[1], s->b[lane % 16]);
  float d[4] = {0, 0, 0, 0};
  mma<E>(d, a, fault == 1 ? b1 : b0, fault == 1 ? b0 : b1);
  if (t >= 32) return;
  for (int i = 0; i < 4; i++) y[(g + i / 2 * (fault == 4 ? 7 : 8)) * 8 + c + i % 2] = i < 2 ? d[i] : d[i] / 2;
}
KERNEL exchanged_b ARGUMENTS { product<broken ? 1 : 0, bf16>(x, y); }
KERNEL exchanged_a ARGUMENTS { product<broken ? 2 : 0, f16>(x, y); }
KERNEL not_transposed ARGUMENTS { product<broken ? 3 : 0, bf16>(x, y); }
KERNEL wrong_row_of_d ARGUMENTS { product<broken ? 4 : 0, f16>(x, y); }

KERNEL mask_off_by_one ARGUMENTS {
  float *s = shared_memory<float>();
  const int t = threadIdx.x, last = N - 1 - t;
  s[t] = x[t];
  __syncthreads();
  float with = 0, without = 0;
  for (int i = 0; i < N; i++) with += (broken ? i < last : i <= last) ? s[i] : 0;
  for (int i = 0; i < N; i++) without += i < last ? s[i] : 0;
  y[t] = with - without;
}

/* Four blocks; the last one adds the 1 that each of them wrote after y[127]. */
KERNEL last_block_relaxed ARGUMENTS {
  uint32_t *flag = shared_memory<uint32_t>(), *counter = reinterpret_cast<uint32_t *>(y + N + 4);
  const int t = threadIdx.x;
  if (t == 0) y[N + blockIdx.x] = 1.0f;
  bool last;
  if (broken) {
    __syncthreads();
    if (t == 0) *flag = atomicAdd(counter, 1u) == 3;
    __syncthreads();
    last = *flag;
  } else {
    last = block_is_last(counter, 4, flag);
  }
  if (last) y[t] = x[N - 1 - t] + y[N] + y[N + 1] + y[N + 2] + y[N + 3] - 4.0f;
}

/* Four blocks; each reads what another writes. */
KERNEL reads_other_block ARGUMENTS {
  const int t = threadIdx.x;
  if (t / 32 == (int)blockIdx.x) y[t] = x[N - 1 - t] + (broken ? 0.0f * y[(t + 32) % N] : 0.0f);
}

KERNEL too_much_shared ARGUMENTS { y[threadIdx.x] = x[N - 1 - threadIdx.x]; }

template <auto right, auto broken>
static int run(const char *how, unsigned blocks, const float *x, float *y, size_t shared = 1024) {
  if (how[0] == 'r') return launch<right>(dim3(blocks), N, shared < 101376 ? shared : 101376, nullptr, x, y);
  return launch<broken>(dim3(blocks), N, shared, nullptr, x, y);
}

int main(int count, char **arguments) {
  const char *name = count > 2 ? arguments[1] : "", *how = count > 2 ? arguments[2] : "";
  if (count > 3) emulator::set_order((unsigned)atoi(arguments[3]));
  float *x = static_cast<float *>(malloc(N * sizeof *x)), *y = static_cast<float *>(calloc(N + 5, sizeof *y));
  for (int i = 0; i < N; i++) x[i] = (float)(i + 1);
  int error = -1;
#define CASE(kernel, ...) \
  if (!strcmp(name, #kernel)) error = run<kernel<false>, kernel<true>>(how, __VA_ARGS__);
  CASE(missing_barrier, 1, x, y, N * 4)
  CASE(missing_warp_barrier, 1, x, y, N * 4)
  CASE(two_writers, 1, x, y)
  CASE(never_written, 1, x, y)
  CASE(order_of_sum, 1, x, y)
  CASE(some_skip_barrier, 1, x, y)
  CASE(some_return, 1, x, y)
  CASE(different_barriers, 1, x, y)
  CASE(some_lanes_shuffle, 1, x, y)
  CASE(different_shuffles, 1, x, y)
  CASE(shuffle_mask, 1, x, y)
  CASE(missing_wait, 1, x, y, N * 4)
  CASE(wait_for_too_few, 1, x, y)
  CASE(missing_commit, 1, x, y)
  CASE(wait_without_barrier, 1, x, y)
  CASE(refill_too_early, 1, x, y)
  CASE(source_changes, 1, x, y)
  CASE(writes_past_shared, 1, x, y, N * 4)
  CASE(reads_past_global, 1, x, y)
  CASE(copies_past_global, 1, x, y)
  CASE(misaligned_vector, 1, x, y)
  CASE(misaligned_copy, 1, x, y)
  CASE(misaligned_matrix, 1, x, y)
  CASE(exchanged_b, 1, x, y)
  CASE(exchanged_a, 1, x, y)
  CASE(not_transposed, 1, x, y)
  CASE(wrong_row_of_d, 1, x, y)
  CASE(mask_off_by_one, 1, x, y)
  CASE(last_block_relaxed, 4, x, y)
  CASE(reads_other_block, 4, x, y)
  CASE(too_much_shared, 1, x, y, 101377)
  int wrong = 0;
  for (int i = 0; i < N; i++) wrong |= !(y[i] == x[N - 1 - i]);
  free(x), free(y);
  return error ? 2 : wrong;
}
