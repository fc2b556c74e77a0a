/* Copies into shared memory and a warp's matrix operations, with the fragment layouts of the PTX manual. */
#include <set>

#include "emulator.h"

namespace emulator {
namespace {
/* Lane l holds columns (or rows) c and c + 1 of row (or column) g. */
int g(int l) { return l / 4; }
int c(int l) { return l % 4 * 2; }

uint32_t packed(uint16_t low, uint16_t high) { return low | (uint32_t)high << 16; }

template <class E>
void split(uint32_t x, float *low, float *high) {
  const float2 both = unpack<E>(x);
  *low = both.x;
  *high = both.y;
}
/* 8 rows of 16 bytes: the shared memory's 32 banks of 4 bytes serve them in one cycle if they lie in different
 * eighths of 128 bytes. Lanes with the same row need only one read. */
void count_conflicts(void *const lanes[8]) {
  std::set<uintptr_t> rows[8];
  size_t cycles = 0;
  for (int l = 0; l < 8; l++) {
    const uintptr_t row = reinterpret_cast<uintptr_t>(static_cast<const Matrices *>(lanes[l])->row) / 16;
    rows[row % 8].insert(row);
    cycles = std::max(cycles, rows[row % 8].size());
  }
  usage.matrices++;
  usage.conflicts += (long)cycles - 1;
}
}  // namespace

void check_aligned(const void *p, size_t size, const char *what, Place place) {
  if (reinterpret_cast<uintptr_t>(p) % size)
    fail("%s at line %d: %p is not a multiple of %zu", what, place.line, p, size);
}

template <bool transposed>
void ldmatrix(void *const lanes[32]) {
  uint16_t matrix[4][8][8];
  for (int l = 0; l < LANES; l++) {
    const Matrices &m = *static_cast<const Matrices *>(lanes[l]);
    check_aligned(m.row, 16, "ldmatrix", m.place);
    if (!in_shared(m.row, 16)) fail("ldmatrix at line %d: lane %d reads outside of shared memory", m.place.line, l);
    note(neighbour(l), m.row, 16, Access::read);
    memcpy(matrix[l / 8][l % 8], m.row, 16);
  }
  for (int i = 0; i < 4; i++) count_conflicts(lanes + 8 * i);
  for (int l = 0; l < LANES; l++)
    for (int i = 0; i < 4; i++) {
      const auto &x = matrix[i];
      uint32_t &r = *static_cast<const Matrices *>(lanes[l])->r[i];
      r = transposed ? packed(x[c(l)][g(l)], x[c(l) + 1][g(l)]) : packed(x[g(l)][c(l)], x[g(l)][c(l) + 1]);
    }
}
template void ldmatrix<false>(void *const *);
template void ldmatrix<true>(void *const *);

/* Products are exact in fp32; they are added from k = 0 on, then to d. A GPU rounds in another order. */
template <class E>
void mma(void *const lanes[32]) {
  float a[16][16], b[16][8], sum[16][8] = {};
  for (int l = 0; l < LANES; l++) {
    const Mma &m = *static_cast<const Mma *>(lanes[l]);
    for (int i = 0; i < 4; i++) {
      float *at = &a[g(l) + i % 2 * 8][c(l) + i / 2 * 8];
      split<E>(m.a[i], at, at + 1);
    }
    split<E>(m.b0, &b[c(l)][g(l)], &b[c(l) + 1][g(l)]);
    split<E>(m.b1, &b[c(l) + 8][g(l)], &b[c(l) + 9][g(l)]);
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) sum[row][column] += a[row][k] * b[k][column];
  for (int l = 0; l < LANES; l++)
    for (int i = 0; i < 4; i++) static_cast<const Mma *>(lanes[l])->d[i] += sum[g(l) + i / 2 * 8][c(l) + i % 2];
}
template void mma<f16>(void *const *);
template void mma<bf16>(void *const *);

/* The destination is NaN until this thread has waited: the copy arrives as late as on a GPU it may, and the old content
 * is overwritten as early. */
void cp_async(void *to, const void *from, int bytes, int size, Place place) {
  const char *const what = size == 16 ? "cp_async_16" : "cp_async_4";
  if (bytes < 0 || bytes > size) fail("%s at line %d: %d bytes", what, place.line, bytes);
  check_aligned(to, size, what, place);
  check_aligned(from, size, what, place);
  if (!in_shared(to, size)) fail("%s at line %d: writes outside of shared memory", what, place.line);
  unsigned char *const at = static_cast<unsigned char *>(to);
  Copy copy = {at, static_cast<const unsigned char *>(from), bytes, size, current->groups, {}};
  if (bytes) memcpy(copy.issued, from, (size_t)bytes);
  if (bytes) note(*current, from, (size_t)bytes, Access::read);
  note(*current, to, (size_t)size, Access::arriving);
  memset(to, 0xff, (size_t)size);
  current->copies.push_back(copy);
}

void cp_async_commit() { current->groups++; }

void cp_async_wait(int newest) {
  size_t done = 0;
  for (auto &copies = current->copies; done < copies.size() && copies[done].group < current->groups - newest; done++) {
    const Copy &copy = copies[done];
    if (copy.bytes && memcmp(copy.issued, copy.from, (size_t)copy.bytes)) fail("what cp_async reads was changed");
    memcpy(copy.to, copy.issued, (size_t)copy.size);
    note(*current, copy.to, (size_t)copy.size, Access::arrived);
  }
  current->copies.erase(current->copies.begin(), current->copies.begin() + (long)done);
}
}  // namespace emulator

float to_float(f16 x) {
  _Float16 y;
  memcpy(&y, &x, sizeof y);
  return (float)y;
}
template <>
f16 from_float<f16>(float x) {
  const _Float16 y = (_Float16)x;
  f16 bits;
  memcpy(&bits, &y, sizeof bits);
  return bits;
}
template <>
bf16 from_float<bf16>(float x) {
  const uint32_t u = __float_as_uint(x), rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return {(uint16_t)(x != x ? 0x7fffu : rounded >> 16)};
}
