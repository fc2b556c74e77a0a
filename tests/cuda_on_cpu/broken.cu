/* Small kernels, each correct unless `broken`, and then wrong in one way that the emulator must catch. Each reverses
 * 128 numbers, y[i] = x[127 - i], with one block of 128 threads unless its comment has other blocks.
 *   broken NAME right|broken [SEED]   exits with 0 if y is as it should be, 1 if not, 2 if the launch failed */
#include <stdio.h>
#include <stdlib.h>

#include "hopper.cuh"
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

/* One product of a warpgroup: A [64, 64] reverses, rows 0 and 1 of B are the halves of x, exchanged. */
enum WgmmaFault {
  NO_PROXY_FENCE = 1,
  NO_FENCE,
  NO_WAIT,
  TOO_FEW,
  B_CHANGES,
  A_CHANGES,
  D_CHANGES,
  MISALIGNED,
  NOT_SWIZZLED,
  WARPS_DIFFER
};
template <int fault>
static __device__ void multiplied(const float *x, float *y) {
  bf16 *const b = atom_aligned(shared_memory<bf16>()) + (fault == MISALIGNED ? ATOM : 0);
  const int t = threadIdx.x, lane = lane_id(), row = t / 32 * 16 + lane / 4, n = t / 64, k = t % 64;
  const bf16 number = from_float<bf16>(x[(1 - n) * 64 + k]); /* the race check does not see a call's store */
  b[n * ATOM + (fault == NOT_SWIZZLED ? k : k ^ 8 * n)].bits = number.bits;
  if (fault != NO_PROXY_FENCE) fence_proxy_async();
  __syncthreads();
  uint32_t a[4][4];
  for (int i = 0; i < 16; i++) {
    const int m = row + i % 2 * 8, column = i / 4 * 16 + i / 2 % 2 * 8 + lane % 4 * 2;
    a[i / 4][i % 4] = pack<bf16>(column == 63 - m ? 1.0f : 0.0f, column + 1 == 63 - m ? 1.0f : 0.0f);
  }
  float d[8][4];
  if (fault != NO_FENCE) wgmma_fence();
  for (int i = 0; i < 4; i++) {
    const int step = fault == WARPS_DIFFER && t >= 96 ? 3 - i : i;
    wgmma<bf16>(d, a[step], operand(b + 16 * step), i > 0);
  }
  wgmma_commit();
  if (fault == B_CHANGES && t == 0) b[0] = bf16{0};
  if (fault == A_CHANGES) a[3][0] ^= 1;
  if (fault == D_CHANGES) d[0][0] = 0;
  if (fault != NO_WAIT) wgmma_wait<fault == TOO_FEW ? 1 : 0>(d);
  if (lane % 4 == 0)
    for (int i = 0; i < 4; i++) y[i % 2 * 64 + row + i / 2 * 8] = d[0][i];
}
KERNEL wgmma_without_proxy_fence ARGUMENTS { multiplied<broken ? NO_PROXY_FENCE : 0>(x, y); }
KERNEL wgmma_without_fence ARGUMENTS { multiplied<broken ? NO_FENCE : 0>(x, y); }
KERNEL wgmma_not_waited ARGUMENTS { multiplied<broken ? NO_WAIT : 0>(x, y); }
KERNEL wgmma_wait_for_too_few ARGUMENTS { multiplied<broken ? TOO_FEW : 0>(x, y); }
KERNEL wgmma_b_changes ARGUMENTS { multiplied<broken ? B_CHANGES : 0>(x, y); }
KERNEL wgmma_a_changes ARGUMENTS { multiplied<broken ? A_CHANGES : 0>(x, y); }
KERNEL wgmma_d_changes ARGUMENTS { multiplied<broken ? D_CHANGES : 0>(x, y); }
KERNEL wgmma_misaligned ARGUMENTS { multiplied<broken ? MISALIGNED : 0>(x, y); }
KERNEL wgmma_not_swizzled ARGUMENTS { multiplied<broken ? NOT_SWIZZLED : 0>(x, y); }
KERNEL wgmma_warps_differ ARGUMENTS { multiplied<broken ? WARPS_DIFFER : 0>(x, y); }

/* The halves of x by TMA, exchanged, and a row past the last, of zeros. */
static bf16 halves[N];
static TensorMap halves_map;
enum BoxFault {
  NOT_WAITED = 1,
  ONE_WAITS,
  WRONG_PARITY,
  EXPECTS_LESS,
  EXPECTS_MORE,
  EXPECTS_TWICE,
  NOT_FENCED,
  MISALIGNED_BOX,
  REFILLED,
  SOURCE_CHANGES
};
template <int fault>
static __device__ void copied(float *y) {
  bf16 *const s = atom_aligned(shared_memory<bf16>()) + (fault == MISALIGNED_BOX ? 8 : 0);
  uint64_t *const barrier = reinterpret_cast<uint64_t *>(s + 8 * ATOM);
  const int t = threadIdx.x, n = t / 64, k = 63 - t % 64;
  const auto fill = [&] {
    if (t > 0) return;
    barrier_expect(barrier, (fault == EXPECTS_LESS ? 2 : fault == EXPECTS_MORE ? 4 : 3) * ATOM_BYTES);
    if (fault == EXPECTS_TWICE) barrier_expect(barrier, 0);
    for (int i = 0; i < 3; i++) copy_box(s + i * ATOM, halves_map, barrier, 0, 0, i < 2 ? 1 - i : i, 0);
  };
  if (t == 0) {
    barrier_init(barrier);
    if (fault != NOT_FENCED) fence_proxy_async();
  }
  fill();
  if (fault == SOURCE_CHANGES && t == 0) halves[3].bits ^= 1;
  __syncthreads();
  if (fault == ONE_WAITS ? t == 0 : fault != NOT_WAITED) barrier_wait(barrier, fault == WRONG_PARITY ? 1 : 0);
  y[t] = to_float(s[n * ATOM + (k ^ 8 * n)]) + to_float(s[2 * ATOM + t % 64]);
  if (fault && fault != REFILLED) return;
  if (!fault) __syncthreads();
  fill();
  barrier_wait(barrier, 1);
  y[t] += to_float(s[n * ATOM + (k ^ 8 * n)]) - to_float(halves[N - 1 - t]);
}
KERNEL box_not_waited(const float *, float *y) { copied<broken ? NOT_WAITED : 0>(y); }
KERNEL box_one_waits(const float *, float *y) { copied<broken ? ONE_WAITS : 0>(y); }
KERNEL box_wrong_parity(const float *, float *y) { copied<broken ? WRONG_PARITY : 0>(y); }
KERNEL box_expects_less(const float *, float *y) { copied<broken ? EXPECTS_LESS : 0>(y); }
KERNEL box_expects_more(const float *, float *y) { copied<broken ? EXPECTS_MORE : 0>(y); }
KERNEL box_expects_twice(const float *, float *y) { copied<broken ? EXPECTS_TWICE : 0>(y); }
KERNEL box_barrier_not_fenced(const float *, float *y) { copied<broken ? NOT_FENCED : 0>(y); }
KERNEL box_misaligned(const float *, float *y) { copied<broken ? MISALIGNED_BOX : 0>(y); }
KERNEL box_refilled_too_early(const float *, float *y) { copied<broken ? REFILLED : 0>(y); }
KERNEL box_source_changes(const float *, float *y) { copied<broken ? SOURCE_CHANGES : 0>(y); }

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
  for (int i = 0; i < N; i++) x[i] = (float)(i + 1), halves[i] = from_float<bf16>(x[i]);
  if (!tensor_map(&halves_map, true, halves, {64, 1, 2, 1}, {128, 128, 256}, {64, 1, 1, 1})) return 3;
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
  CASE(wgmma_without_proxy_fence, 1, x, y, 10240)
  CASE(wgmma_without_fence, 1, x, y, 10240)
  CASE(wgmma_not_waited, 1, x, y, 10240)
  CASE(wgmma_wait_for_too_few, 1, x, y, 10240)
  CASE(wgmma_b_changes, 1, x, y, 10240)
  CASE(wgmma_a_changes, 1, x, y, 10240)
  CASE(wgmma_d_changes, 1, x, y, 10240)
  CASE(wgmma_misaligned, 1, x, y, 10240)
  CASE(wgmma_not_swizzled, 1, x, y, 10240)
  CASE(wgmma_warps_differ, 1, x, y, 10240)
  CASE(box_not_waited, 1, x, y, 4096)
  CASE(box_one_waits, 1, x, y, 4096)
  CASE(box_wrong_parity, 1, x, y, 4096)
  CASE(box_expects_less, 1, x, y, 4096)
  CASE(box_expects_more, 1, x, y, 4096)
  CASE(box_expects_twice, 1, x, y, 4096)
  CASE(box_barrier_not_fenced, 1, x, y, 4096)
  CASE(box_misaligned, 1, x, y, 4096)
  CASE(box_refilled_too_early, 1, x, y, 4096)
  CASE(box_source_changes, 1, x, y, 4096)
  CASE(mask_off_by_one, 1, x, y)
  CASE(last_block_relaxed, 4, x, y)
  CASE(reads_other_block, 4, x, y)
  CASE(too_much_shared, 1, x, y, 101377)
  int wrong = 0;
  for (int i = 0; i < N; i++) wrong |= !(y[i] == x[N - 1 - i]);
  free(x), free(y);
  return error ? 2 : wrong;
}
