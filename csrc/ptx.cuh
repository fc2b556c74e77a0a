/* All inline PTX for sm_80 and up, one function for each instruction, and the 16-bit types; hopper.cuh has the PTX
 * of sm_90a. Kernels use PTX only through these two files. tests/cuda_on_cpu/ptx.h has the same functions in plain
 * C++: add a new function to both.
 *
 * Fragments of mma (PTX manual, m16n8k16). Lane l has g = l / 4 and c = 2 * (l % 4). A register of A or B holds two
 * 16-bit values, the one of the lower column (A) or row (B) in its low half; a register of D holds one fp32:
 *   A [16, 16]  a[0] = A[g, c..]    a[1] = A[g + 8, c..]    a[2] = A[g, c + 8..]    a[3] = A[g + 8, c + 8..]
 *   B [16, 8]   b0 = B[c.., g]      b1 = B[c + 8.., g]
 *   D [16, 8]   d[0], d[1] = D[g, c], D[g, c + 1]           d[2], d[3] = D[g + 8, c], D[g + 8, c + 1]
 * ldmatrix_x4 fills register i of every lane from the 8x8 matrix whose rows are at the addresses of lanes 8 i .. 8 i +
 * 7: lane l gets columns c and c + 1 of row g, and with _trans rows c and c + 1 of column g. */
#ifndef KV_PTX_CUH
#define KV_PTX_CUH
#include <cuda_runtime.h>
#include <stdint.h>

#define KV_DEVICE static __device__ __forceinline__

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

/* Returns the block's dynamic shared memory, aligned to 128 bytes. Kernels use no other shared memory. */
template <class T>
KV_DEVICE T *shared_memory() {
  extern __shared__ __align__(128) unsigned char kv_shared[];
  return reinterpret_cast<T *>(kv_shared);
}

KV_DEVICE uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

/* Loads four 8x8 matrices of 16-bit values, as the top of this file describes. row: the row of a matrix that this
 * lane addresses, in shared memory and aligned to 16 bytes. */
KV_DEVICE void ldmatrix_x4(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared_address(row))
               : "memory");
}
KV_DEVICE void ldmatrix_x4_trans(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared_address(row))
               : "memory");
}

/* d += A B for one fragment each of A, B and D; E is f16 or bf16. */
template <class E>
KV_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define KV_MMA(type)                                                                  \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  KV_MMA("f16");
}
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  KV_MMA("bf16");
}
#undef KV_MMA

/* Returns a * b + c, rounded once, for the two fp16 numbers that each register holds. */
KV_DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

/* Returns four bytes of x (bytes 0 to 3) and y (bytes 4 to 7): byte i of the result is the one with the number in
 * bits 4 i .. 4 i + 3 of the selector. */
KV_DEVICE uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
  return z;
}

/* Starts copying `bytes` (0..16) bytes from global to shared memory, padded with zeros to 16; both addresses are
 * multiples of 16. This thread may read `to` after cp_async_wait, other threads after a barrier that follows it.
 * `from` is not read if bytes = 0. */
KV_DEVICE void cp_async_16(void *to, const void *from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}
/* Starts copying 4 bytes from global to shared memory, as cp_async_16 does; both addresses are multiples of 4. */
KV_DEVICE void cp_async_4(void *to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from))
               : "memory");
}
KV_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until all groups of copies that this thread committed, but the last N, have arrived. */
template <int N>
KV_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

/* Does what cp_async_wait<n> does, for an n from 1 to 3 that is not a constant. */
KV_DEVICE void cp_async_wait_but(int n) {
  if (n == 1) cp_async_wait<1>();
  if (n == 2) cp_async_wait<2>();
  if (n == 3) cp_async_wait<3>();
}

/* Returns log2 x. The error is at most 2^-22 for x between 1/2 and 2, otherwise at most 2^-22 of the result. */
KV_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Returns 2^x with a relative error of at most 2^-22; results below 2^-126 become 0, and 2^-inf is 0. */
KV_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Conversions between float and E, rounded to nearest even. pack puts two numbers of E into one register; unpack
 * returns them as floats. */
template <class E>
KV_DEVICE uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

KV_DEVICE float to_float(float x) { return x; }
KV_DEVICE float to_float(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
KV_DEVICE float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <class E>
KV_DEVICE float2 unpack(uint32_t x) {
  return make_float2(to_float(E{(uint16_t)(x & 0xffffu)}), to_float(E{(uint16_t)(x >> 16)}));
}

template <class E>
KV_DEVICE E from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return bf16{(uint16_t)(pack<bf16>(x, 0.0f) & 0xffffu)};
}

/* Loads 16 bytes of global memory that this kernel reads once and does not write: they are not kept in L1. `p` is
 * aligned to 16 bytes. */
KV_DEVICE uint4 load_once_16(const void *p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(__cvta_generic_to_global(p)));
  return x;
}
/* Returns load_once_16(p) if `wanted`, else zeros without reading `p`. The load is predicated: there is no branch. */
KV_DEVICE uint4 load_once_16_if(const void *p, bool wanted) {
  uint4 x = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(__cvta_generic_to_global(p)), "r"((int)wanted));
  return x;
}
/* Loads 4 bytes as load_once_16_if loads 16; `p` is aligned to 4 bytes. */
KV_DEVICE uint32_t load_once_4_if(const void *p, bool wanted) {
  uint32_t x = 0;
  asm volatile(
      "{.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.u32 %0, [%1];}"
      : "+r"(x)
      : "l"(__cvta_generic_to_global(p)), "r"((int)wanted));
  return x;
}

/* Waits until the kernels before this one on its stream have ended; this thread then sees what they wrote. A kernel
 * that launch_early starts must call it before it reads or writes global memory. */
KV_DEVICE void await_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* Lets the stream's next kernel, if launch_early launched it, begin once all blocks of this kernel have called this
 * function. */
KV_DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Adds x to *p atomically and returns the value before. What this thread wrote, or saw through a barrier, becomes
 * visible to the whole GPU before the addition. After it this thread sees what earlier callers made visible in this
 * way. */
KV_DEVICE uint32_t atomic_add_acq_rel(uint32_t *p, uint32_t x) {
  uint32_t y;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(y)
               : "l"(__cvta_generic_to_global(p)), "r"(x)
               : "memory");
  return y;
}
#endif
