/* The functions of csrc/ptx.cuh, csrc/hopper.cuh and csrc/launch.cuh in plain C++. Included before everything else (-include), it
 * replaces them by defining their include guards. */
#ifndef KV_PTX_H
#define KV_PTX_H
#define KV_PTX_CUH
#define KV_LAUNCH_CUH
#define KV_DEVICE static __device__ __forceinline__
#include "cuda_runtime.h"

#ifndef KV_MOST_GRID_Y
#define KV_MOST_GRID_Y 3 /* a GPU has 65,535; with 3 a few heads already take layers in z (grid.cuh) */
#endif
constexpr int64_t MOST_GRID_Y = KV_MOST_GRID_Y;

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

namespace emulator {
void *block_shared();

struct Matrices {
  uint32_t *r[4];
  const void *row;
  Place place;
};
template <bool transposed>
void ldmatrix(void *const lanes[32]);

struct Mma {
  float *d;
  const uint32_t *a;
  uint32_t b0, b1;
};
template <class E>
void mma(void *const lanes[32]);

void cp_async(void *to, const void *from, int bytes, int size, Place place);
void cp_async_commit();
void cp_async_wait(int newest);
void check_aligned(const void *p, size_t size, const char *what, Place place);

/* Threads and blocks of the launches that follow run in this random order; 0, as at first: in ascending order. */
void set_order(unsigned seed);

/* Since the last reset: the largest dynamic shared memory of a block, the number of ldmatrix's 8x8 matrices, and of
 * bank conflicts between their rows, each of which costs a cycle on a GPU. */
struct Usage {
  size_t shared;
  long matrices, conflicts;
};
extern Usage usage;

/* One launch; call(arguments) runs the kernel as one thread. */
int run_grid(const char *name, dim3 grid, int threads, size_t shared, void (*call)(void *), void *arguments);
}  // namespace emulator

template <class T>
T *shared_memory() {
  return static_cast<T *>(emulator::block_shared());
}

#include "hopper.h"

#define KV_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void ldmatrix_x4(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, const void *row, KV_AT) {
  emulator::Matrices m = {{&r0, &r1, &r2, &r3}, row, {file, line}};
  emulator::collective("ldmatrix_x4", m.place, &m, emulator::ldmatrix<false>);
}
inline void ldmatrix_x4_trans(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, const void *row, KV_AT) {
  emulator::Matrices m = {{&r0, &r1, &r2, &r3}, row, {file, line}};
  emulator::collective("ldmatrix_x4_trans", m.place, &m, emulator::ldmatrix<true>);
}

template <class E>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, KV_AT) {
  emulator::Mma m = {d, a, b0, b1};
  emulator::collective("mma", {file, line}, &m, emulator::mma<E>);
}
inline void cp_async_16(void *to, const void *from, int bytes = 16, KV_AT) {
  emulator::cp_async(to, from, bytes, 16, {file, line});
}
inline void cp_async_4(void *to, const void *from, KV_AT) { emulator::cp_async(to, from, 4, 4, {file, line}); }
inline void cp_async_commit() { emulator::cp_async_commit(); }
template <int N>
void cp_async_wait() {
  emulator::cp_async_wait(N);
}

inline void cp_async_wait_but(int n) { emulator::cp_async_wait(n); }

inline float log2_approx(float x) { return log2f(x); }
inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
float to_float(f16 x);
template <class E>
E from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
f16 from_float<f16>(float x);
template <>
bf16 from_float<bf16>(float x);
template <class E>
uint32_t pack(float low, float high) {
  return from_float<E>(low).bits | (uint32_t)from_float<E>(high).bits << 16;
}
template <class E>
float2 unpack(uint32_t x) {
  return make_float2(to_float(E{(uint16_t)(x & 0xffffu)}), to_float(E{(uint16_t)(x >> 16)}));
}

inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const float2 x = unpack<f16>(a), y = unpack<f16>(b), z = unpack<f16>(c);
  return pack<f16>(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = x | (uint64_t)y << 32;
  uint32_t z = 0;
  for (int i = 0; i < 4; i++) z |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return z;
}

inline uint4 load_once_16(const void *p, KV_AT) {
  emulator::check_aligned(p, 16, "load_once_16", {file, line});
  return *static_cast<const uint4 *>(p);
}
inline uint4 load_once_16_if(const void *p, bool wanted, KV_AT) {
  return wanted ? load_once_16(p, file, line) : make_uint4(0, 0, 0, 0);
}
inline uint32_t load_once_4_if(const void *p, bool wanted, KV_AT) {
  if (!wanted) return 0;
  emulator::check_aligned(p, 4, "load_once_4_if", {file, line});
  return *static_cast<const uint32_t *>(p);
}
/* Kernels run one after another. */
inline void await_kernels_before() {}
inline void start_next_kernel() {}

inline uint32_t atomic_add_acq_rel(uint32_t *p, uint32_t x) {
  return emulator::atomically(p, emulator::Sharing::acquire_release, [x](uint32_t y) { return y + x; });
}
#undef KV_AT

template <auto kernel, class... Args>
int launch(dim3 grid, int threads, size_t shared, void *, Args... args) {
  auto call = [&] { kernel(args...); };
  return emulator::run_grid(
      __PRETTY_FUNCTION__, grid, threads, shared, [](void *c) { (*static_cast<decltype(call) *>(c))(); }, &call);
}
template <auto kernel, class... Args>
int launch_early(dim3 grid, int threads, size_t shared, void *stream, Args... args) {
  return launch<kernel>(grid, threads, shared, stream, args...);
}
#endif
