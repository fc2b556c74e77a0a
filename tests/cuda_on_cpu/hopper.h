/* The functions of csrc/hopper.cuh in plain C++; included by ptx.h, it replaces that file (hopper.cpp). */
#ifndef KV_HOPPER_H
#define KV_HOPPER_H
#define KV_HOPPER_CUH

struct TensorMap {
  const unsigned char *x;
  uint64_t size[4], stride[3];
  uint32_t box[4];
};

namespace emulator {
uint32_t shared_address(const void *p);

/* A lane's part of a product of a warp. */
struct Wgmma {
  float (*d)[4];
  const uint32_t *a;
  uint32_t b;
  bool add;
  int columns; /* of d, 8 each */
  Place place;
};
template <class E>
void wgmma(void *const lanes[32]);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int newest, Place place);

void fence_proxy_async();
void barrier_init(uint64_t *barrier, Place place);
void barrier_expect(uint64_t *barrier, uint32_t bytes, Place place);
void barrier_wait(uint64_t *barrier, uint32_t parity, Place place);
void copy_box(void *to, const TensorMap &map, uint64_t *barrier, const int (&at)[4], Place place);
}  // namespace emulator

constexpr int ATOM = 64, ATOM_BYTES = 128;

template <class T>
T *atom_aligned(T *p) {
  return reinterpret_cast<T *>(reinterpret_cast<unsigned char *>(p) + (0u - emulator::shared_address(p)) % 1024);
}
inline uint32_t operand(const void *b) { return (emulator::shared_address(b) >> 4 & 0x3fffu) | 1u << 16; }
inline uint32_t operand_on(uint32_t b, int bytes) { return b + bytes / 16; }

#define KV_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()
template <class E, int columns>
void wgmma(float (&d)[columns][4], const uint32_t (&a)[4], uint32_t b, bool add, KV_AT) {
  emulator::Wgmma mine = {d, a, b, add, columns, {file, line}};
  emulator::collective("wgmma", mine.place, &mine, emulator::wgmma<E>);
}
inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int N, int columns>
void wgmma_wait(float (&)[columns][4], KV_AT) {
  emulator::wgmma_wait(N, {file, line});
}

inline void fence_proxy_async() { emulator::fence_proxy_async(); }
inline void barrier_init(uint64_t *barrier, KV_AT) { emulator::barrier_init(barrier, {file, line}); }
inline void barrier_expect(uint64_t *barrier, uint32_t bytes, KV_AT) {
  emulator::barrier_expect(barrier, bytes, {file, line});
}
inline void barrier_wait(uint64_t *barrier, uint32_t parity, KV_AT) {
  emulator::barrier_wait(barrier, parity, {file, line});
}
inline void copy_box(void *to, const TensorMap &map, uint64_t *barrier, int c0, int c1, int c2, int c3, KV_AT) {
  emulator::copy_box(to, map, barrier, {c0, c1, c2, c3}, {file, line});
}
#undef KV_AT

/* What cuTensorMapEncodeTiled demands of a tensor whose boxes are swizzled by 128 bytes. */
inline bool tensor_map(TensorMap *map, bool, const void *x, const uint64_t (&size)[4], const uint64_t (&stride)[3],
                       const uint32_t (&box)[4]) {
  bool good = (uintptr_t)x % 16 == 0 && box[0] * 2 <= ATOM_BYTES && box[0] * 2 % 16 == 0;
  for (int i = 0; i < 4; i++) good &= size[i] > 0 && size[i] <= 1ull << 32 && box[i] > 0 && box[i] <= 256;
  for (int i = 0; i < 3; i++) good &= stride[i] % 16 == 0 && stride[i] < 1ull << 40;
  *map = {static_cast<const unsigned char *>(x), {}, {}, {}};
  memcpy(map->size, size, sizeof size), memcpy(map->stride, stride, sizeof stride), memcpy(map->box, box, sizeof box);
  return good;
}
#endif
