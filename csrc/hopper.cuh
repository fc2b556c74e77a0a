/* PTX that only Hopper has (sm_90a): matrix products of a warpgroup (wgmma), and copies of boxes of a tensor (TMA),
 * whose end a barrier in shared memory reports. As in ptx.cuh there is one function for each instruction;
 * tests/cuda_on_cpu/hopper.h has the same functions in plain C++. Only files *_sm90.cu include this.
 *
 * A warpgroup is 4 consecutive warps, the first with a number that is a multiple of 4; all its threads call a wgmma
 * function together. Warp w (0..3) has rows 16 w .. 16 w + 15 of A [64, 16] and D [64, 64], in the fragments of
 * ptx.cuh. B [64, 16] lies in shared memory, whose rows are stored in atoms of 64 columns that start at multiples of
 * 1024 bytes. Row r of an atom starts at the atom's byte 128 r; the row's 16-byte vector c is at byte 16 (c ^ r % 8)
 * of the row. In other words, bits 4 to 6 of a linear address are XORed with its bits 7 to 9. */
#ifndef KV_HOPPER_CUH
#define KV_HOPPER_CUH
#include <cudaTypedefs.h>

#include "ptx.cuh"

constexpr int ATOM = 64, ATOM_BYTES = 128; /* 16-bit columns of an atom; bytes of a row of an atom */

/* Returns the first address from p on, in shared memory, at which an atom may start. It is at most 896 bytes after p
 * if p is aligned to 128 bytes, as shared_memory() is. */
template <class T>
KV_DEVICE T *atom_aligned(T *p) {
  return reinterpret_cast<T *>(reinterpret_cast<unsigned char *>(p) + (0u - shared_address(p)) % 1024);
}

/* operand returns the lower 32 bits of the 64-bit descriptor by which wgmma takes B. b: B's first column in the
 * first row of an atom. Bits 0-13: the address / 16; bits 16-29: the distance between columns of atoms, unused with
 * this swizzle. OPERAND has the upper 32 bits in place. Bits 32-45: the distance in bytes between groups of 8 rows /
 * 16; bits 62-63: 1 for the swizzle of 128 bytes. */
KV_DEVICE uint32_t operand(const void *b) { return (shared_address(b) >> 4 & 0x3fffu) | 1u << 16; }
constexpr uint64_t OPERAND = (uint64_t)(8 * ATOM_BYTES / 16) << 32 | 1ull << 62;
/* Returns operand b moved on by `bytes` bytes, a multiple of 16. */
KV_DEVICE uint32_t operand_on(uint32_t b, int bytes) { return b + bytes / 16; }

#define KV_4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define KV_32(d) KV_4(d, 0), KV_4(d, 1), KV_4(d, 2), KV_4(d, 3), KV_4(d, 4), KV_4(d, 5), KV_4(d, 6), KV_4(d, 7)
#define KV_WGMMA(type)                                                                                               \
  asm volatile(                                                                                                      \
      "{.reg .pred add;\n"                                                                                           \
      "setp.ne.b32 add, %37, 0;\n"                                                                                   \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                    \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18,"                       \
      " %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;}" \
      : KV_32(d)                                                                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(OPERAND | b), "r"((int)add)                                  \
      : "memory")

/* Starts d = A B^T, or d += A B^T if `add`; a: fragments of A; b: operand() of B. The registers a and the memory of
 * B must not change, nor may d be read, before wgmma_wait. */
template <class E>
KV_DEVICE void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b, bool add);
template <>
__device__ __forceinline__ void wgmma<f16>(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b, bool add) {
  KV_WGMMA("f16");
}
template <>
__device__ __forceinline__ void wgmma<bf16>(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b, bool add) {
  KV_WGMMA("bf16");
}

/* Must be called before a wgmma whose registers a or d other instructions have written or read since the last wgmma. */
KV_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KV_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until all committed groups of products but the last N are done; d must be the result of a group that is then
 * done. */
template <int N>
KV_DEVICE void wgmma_wait(float (&d)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : KV_32(d) : "n"(N) : "memory");
}
#undef KV_4
#undef KV_32
#undef KV_WGMMA

/* Makes what this thread wrote to shared memory, barriers included, visible to TMA and to wgmma's reads of B. */
KV_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* Makes a barrier. A phase of the barrier ends when one thread has called barrier_expect(bytes) and TMA has copied
 * that many bytes. */
KV_DEVICE void barrier_init(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
KV_DEVICE void barrier_expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/* Waits until the phase with this parity ends: 0 for the first phase, 1 for the second, 0 for the third, .. This
 * thread then sees what TMA copied. */
KV_DEVICE void barrier_wait(uint64_t *barrier, uint32_t parity) {
  uint32_t done;
  do
    asm volatile(
        "{.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  while (!done);
}

/* Describes to TMA a tensor of 16-bit numbers, from which copy_box copies boxes of up to 64 columns into atoms, row
 * by row. */
using TensorMap = CUtensorMap;

/* Fills `map` with a description of x [size[3], size[2], size[1], size[0]] and of boxes of box[3], .., box[0]
 * numbers. Strides are in bytes; that of the last dimension is one number. bf16: the numbers are bf16, else fp16.
 * Returns false if TMA cannot copy from such a tensor. */
static inline bool tensor_map(TensorMap *map, bool bf16, const void *x, const uint64_t (&size)[4],
                              const uint64_t (&stride)[3], const uint32_t (&box)[4]) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult how;
  const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
  if (error != cudaSuccess || how != cudaDriverEntryPointSuccess) return false;
  const uint32_t every[4] = {1, 1, 1, 1};
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found)(
             map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<void *>(x),
             size, stride, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Starts copying the box whose first number is x[c3, c2, c1, c0] to `to` in shared memory, aligned to 128 bytes;
 * numbers outside of the tensor become 0. All bytes of the box, such zeros included, count for the barrier's phase.
 * One thread calls it; map must be a kernel's __grid_constant__ parameter. */
KV_DEVICE void copy_box(void *to, const TensorMap &map, uint64_t *barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
#endif
