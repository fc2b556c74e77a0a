/* Replaces CUDA's header of this name for a C++17 host compiler, with the parts that the kernels use; anything else
 * does not compile. Every thread of a block is a coroutine that yields where it waits for others (emulator.cpp). */
#ifndef KV_CUDA_RUNTIME_H
#define KV_CUDA_RUNTIME_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#define __global__
#define __host__
#define __device__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

typedef int cudaError_t;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorLaunchFailure = 719;
const char *cudaGetErrorString(cudaError_t error);
typedef void *cudaStream_t; /* every call is synchronous */
inline cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}

/* Of the GPU whose grids are planned; the emulator runs them on any. */
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
inline cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  const int of_h100[] = {132, 228 << 10, 9, 0};
  *value = of_h100[attribute];
  return cudaSuccess;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 {
  unsigned x, y, z;
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {
struct Place {
  const char *file;
  int line;
};

/* Waits for all threads of the block; returns for how many the predicate is true. */
int barrier(const char *what, Place place, bool predicate = false);

/* Waits until all lanes of the warp call this at `place` with the same `what`; the last one then calls run with the 32
 * lanes' `mine`. */
void collective(const char *what, Place place, void *mine, void (*run)(void *const lanes[32]));

enum class Sharing { plain, relaxed, acquire_release };
/* Tells the race check of an atomic; p must be a multiple of size. */
void note_atomic(const void *p, size_t size, Sharing sharing);

struct Shuffle {
  uint64_t value, result;
  int source;
};
void shuffle(void *const lanes[32]);
struct Vote {
  int predicate;
  unsigned ballot;
};
void vote(void *const lanes[32]);
void warp_barrier(unsigned mask, Place place);
int lane();
void full(unsigned mask);

template <class T>
T shuffled(const char *what, Place place, unsigned mask, T x, int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  full(mask);
  Shuffle s = {0, 0, source};
  memcpy(&s.value, &x, sizeof x);
  collective(what, place, &s, shuffle);
  memcpy(&x, &s.result, sizeof x);
  return x;
}

template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) T atomically(T *p, Sharing sharing, F change) {
  note_atomic(p, sizeof(T), sharing);
  const T before = *p;
  *p = change(before);
  return before;
}
}  // namespace emulator

/* The caller's line: default arguments are evaluated at the place of the call. */
#define KV_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(KV_AT) { emulator::barrier("__syncthreads", {file, line}); }
inline int __syncthreads_or(int predicate, KV_AT) {
  return emulator::barrier("__syncthreads_or", {file, line}, predicate != 0) > 0;
}
inline int __syncthreads_and(int predicate, KV_AT) {
  return emulator::barrier("__syncthreads_and", {file, line}, predicate != 0) == (int)blockDim.x;
}
inline void __syncwarp(unsigned mask = ~0u, KV_AT) { emulator::warp_barrier(mask, {file, line}); }

/* A lane with its source outside its segment of `width` lanes keeps its value. */
template <class T>
T __shfl_sync(unsigned mask, T x, int source, int width = 32, KV_AT) {
  const int first = emulator::lane() & -width;
  return emulator::shuffled("shfl", {file, line}, mask, x, first + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int with, int width = 32, KV_AT) {
  const int lane = emulator::lane(), source = lane ^ with;
  const bool inside = source < (lane & -width) + width && source < 32;
  return emulator::shuffled("shfl_xor", {file, line}, mask, x, inside ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, KV_AT) {
  const int lane = emulator::lane(), source = lane - (int)by;
  return emulator::shuffled("shfl_up", {file, line}, mask, x, source < (lane & -width) ? lane : source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, KV_AT) {
  emulator::full(mask);
  emulator::Vote v = {predicate != 0, 0};
  emulator::collective("vote", {file, line}, &v, emulator::vote);
  return v.ballot;
}
inline int __any_sync(unsigned mask, int predicate, KV_AT) { return __ballot_sync(mask, predicate, file, line) != 0; }
#undef KV_AT

template <class T>
T atomicAdd(T *p, T x) {
  return emulator::atomically(p, emulator::Sharing::relaxed, [x](T y) { return (T)(y + x); });
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline unsigned __float_as_uint(float x) {
  unsigned u;
  memcpy(&u, &x, sizeof u);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}
/* Not contracted: build.py compiles with -ffp-contract=off. */
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
#endif
