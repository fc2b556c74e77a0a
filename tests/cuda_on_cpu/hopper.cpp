/* Hopper's products of a warpgroup, its barriers in shared memory and copies of boxes (csrc/hopper.cuh), as late and as
 * strictly as a GPU may do them: accumulators are NaN until they are waited for, and then the operands must be those of
 * the issue; what a box brings is NaN until a thread waits for its phase.
 *
 * TMA and wgmma's reads of B are the asynchronous proxy: what a thread wrote by other means they see after its
 * fence_proxy_async (race.cpp, which knows who wrote what). */
#include <map>

#include "emulator.h"

namespace emulator {
namespace {
constexpr uint32_t POISON = 0x7fc0dead; /* a NaN */
/* Dynamic shared memory starts where no more than its declared alignment holds. */
constexpr uint32_t SHARED_AT = 1024 + 128;

unsigned char *at_shared(uint32_t address) { return block.shared + (address - SHARED_AT); }
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/* Where the 16 bytes with columns 8 half .. of row r of B are. */
unsigned char *part_of(uint32_t b, int r, int half) {
  return at_shared(swizzled(((b & 0x3fff) << 4) + (uint32_t)(r * ATOM_BYTES + 16 * half)));
}

void check_operand(uint32_t b, int rows, Place place) {
  const uint32_t start = (b & 0x3fff) << 4;
  if (b >> 14 != 4) fail("wgmma at line %d: not an operand()", place.line);
  if (start >> 7 & 7) fail("wgmma at line %d: its rows do not start at a multiple of 1024 bytes", place.line);
  if (start % 32) fail("wgmma at line %d: its columns are not a multiple of 16", place.line);
  for (int i = 0; i < 2 * rows; i++)
    if (!in_shared(part_of(b, i / 2, i % 2), 16))
      fail("wgmma at line %d: row %d is outside of shared memory", place.line, i / 2);
}

/* B, read by the warp that executes. */
std::vector<uint16_t> read_b(uint32_t b, int rows) {
  std::vector<uint16_t> x(16 * (size_t)rows);
  for (int i = 0; i < 2 * rows; i++) {
    note(neighbour(LANES - 1), part_of(b, i / 2, i % 2), 16, Access::read_async);
    memcpy(&x[8 * (size_t)i], part_of(b, i / 2, i % 2), 16);
  }
  return x;
}

/* The last product under way with this accumulator. */
Product *under_way(Thread &thread, const void *d) {
  for (auto p = thread.products.rbegin(); p != thread.products.rend(); ++p)
    if (p->d == d) return &*p;
  return nullptr;
}

template <class E>
float number(uint16_t bits) {
  return to_float(E{bits});
}
}  // namespace

uint32_t shared_address(const void *p) {
  return SHARED_AT + (uint32_t)(static_cast<const unsigned char *>(p) - block.shared);
}

/* Each warp multiplies its 16 rows; the warps of a warpgroup must bring the same operands in the same order. */
template <class E>
void wgmma(void *const lanes[32]) {
  const Wgmma &first = *static_cast<const Wgmma *>(lanes[0]);
  const int rows = 8 * first.columns, warp = current->number / LANES;
  check_operand(first.b, rows, first.place);
  auto &brought = block.brought[warp / 4];
  const size_t number_of = block.multiplied[warp]++;
  if (number_of == brought.size()) brought.push_back(first.b);
  if (brought[number_of] != first.b) fail("wgmma at line %d: another operand than other warps'", first.place.line);

  const std::vector<uint16_t> b = read_b(first.b, rows);
  float a[16][16];
  for (int l = 0; l < LANES; l++)
    for (int i = 0; i < 4; i++) {
      const Wgmma &m = *static_cast<const Wgmma *>(lanes[l]);
      float *at = &a[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8];
      at[0] = number<E>((uint16_t)m.a[i]), at[1] = number<E>((uint16_t)(m.a[i] >> 16));
    }
  for (int l = 0; l < LANES; l++) {
    const Wgmma &m = *static_cast<const Wgmma *>(lanes[l]);
    Thread &thread = neighbour(l);
    if (m.b != first.b || m.add != first.add) fail("wgmma at line %d: lanes bring different ones", m.place.line);
    if (!thread.fenced) fail("wgmma at line %d: registers without wgmma_fence", m.place.line);
    const Product *before = under_way(thread, m.d);
    Product p = {m.d, m.a, m.b, {m.a[0], m.a[1], m.a[2], m.a[3]}, thread.product_groups, {}, {}};
    for (int i = 0; i < 4 * m.columns; i++) {
      const int row = l / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + l % 4 * 2 + i % 2;
      float sum = !m.add ? 0 : before ? before->result[(size_t)i] : m.d[i / 4][i % 4];
      for (int k = 0; k < 16; k++) sum += a[row][k] * number<E>(b[(size_t)column * 16 + (size_t)k]);
      p.result.push_back(sum);
      m.d[i / 4][i % 4] = __uint_as_float(POISON);
    }
    if (l == 0) p.b_issued = b;
    thread.products.push_back(p);
  }
}
template void wgmma<f16>(void *const *);
template void wgmma<bf16>(void *const *);

void wgmma_fence() { current->fenced = true; }
void wgmma_commit() { current->product_groups++; }

/* After a wait registers may be accessed, so that the next product needs a fence. */
void wgmma_wait(int newest, Place place) {
  collective("wgmma_wait", place, nullptr, [](void *const *) {});
  current->fenced = false;
  auto &products = current->products;
  while (!products.empty() && products.front().group < current->product_groups - newest) {
    const Product p = products.front();
    products.erase(products.begin());
    if (memcmp(p.a, p.a_issued, sizeof p.a_issued)) fail("a register of A was written before wgmma_wait");
    if (!p.b_issued.empty() && read_b(p.b, (int)p.b_issued.size() / 16) != p.b_issued)
      fail("wgmma's B was written before wgmma_wait");
    if (under_way(*current, p.d)) continue;
    for (size_t i = 0; i < p.result.size(); i++) {
      if (__float_as_uint(p.d[i / 4][i % 4]) != POISON) fail("an accumulator was written before wgmma_wait");
      p.d[i / 4][i % 4] = p.result[i];
    }
  }
}

namespace {
/* A barrier of one arrival in each phase. */
struct Barrier {
  uint16_t number;    /* 1, 2, ... */
  const Thread *made; /* by which, and after how many fences of it */
  uint32_t fences;
  uint32_t phase; /* ended */
  bool arrived;
  long bytes; /* expected and not yet issued */
  std::vector<Copy> copies;
  std::vector<Thread *> waiting;
};
std::map<const void *, Barrier> barriers;

Barrier &barrier_at(uint64_t *barrier, Place place) {
  const auto found = barriers.find(barrier);
  if (found == barriers.end()) fail("a barrier at line %d was not initialised", place.line);
  note(*current, barrier, 8, Access::atomic);
  return found->second;
}

/* Ends the phase for a thread that waits for it, if all its bytes are issued: now they arrive. */
void try_to_end(Barrier &b) {
  if (b.bytes < 0 && b.arrived) fail("a barrier gets %ld bytes more than it expects", -b.bytes);
  if (!b.arrived || b.bytes) return;
  b.phase++, b.arrived = false;
  for (const Copy &copy : b.copies) {
    if (copy.bytes && memcmp(copy.issued, copy.from, (size_t)copy.bytes)) fail("what TMA reads was changed");
    memcpy(copy.to, copy.issued, 16);
    note(*current, copy.to, 16, Access::arrived, {b.number, b.phase});
  }
  b.copies.clear();
}

void wake(Barrier &b) {
  if (b.waiting.empty()) return;
  try_to_end(b);
  for (Thread *thread : b.waiting) make_ready(*thread);
  b.waiting.clear();
}
}  // namespace

void begin_block_barriers() {
  barriers.clear();
  for (auto &brought : block.brought) brought.clear();
  std::fill(block.multiplied, block.multiplied + LANES, 0);
}

void fence_proxy_async() { current->fences++; }

void barrier_init(uint64_t *barrier, Place place) {
  check_aligned(barrier, 8, "barrier_init", place);
  if (!in_shared(barrier, 8)) fail("barrier_init at line %d: not in shared memory", place.line);
  note(*current, barrier, 8, Access::write);
  const uint16_t number = (uint16_t)(barriers.size() + 1);
  if (number > MOST_BARRIERS) fail("more than %d barriers", MOST_BARRIERS);
  barriers[barrier] = {number, current, current->fences, 0, false, 0, {}, {}};
}

void barrier_expect(uint64_t *barrier, uint32_t bytes, Place place) {
  Barrier &b = barrier_at(barrier, place);
  if (b.arrived) fail("barrier_expect at line %d: nobody has waited for the phase before", place.line);
  b.arrived = true, b.bytes += bytes;
  wake(b);
}

void barrier_wait(uint64_t *barrier, uint32_t parity, Place place) {
  Barrier &b = barrier_at(barrier, place);
  if (parity > 1) fail("barrier_wait at line %d: parity %u", place.line, parity);
  while (b.phase % 2 == parity) {
    try_to_end(b);
    if (b.phase % 2 != parity) break;
    b.waiting.push_back(current);
    wait_elsewhere("barrier_wait", place);
  }
  current->waited[b.number] = b.phase;
}

void copy_box(void *to, const TensorMap &map, uint64_t *barrier, const int (&at)[4], Place place) {
  Barrier &b = barrier_at(barrier, place);
  if (b.made->fences == b.fences) fail("copy_box at line %d: no fence_proxy_async after barrier_init", place.line);
  if (shared_address(to) % 128) fail("copy_box at line %d: not to a multiple of 128 bytes", place.line);
  const uint32_t *box = map.box, start = shared_address(to);
  for (uint32_t i = 0, parts = box[0] / 8, all = parts * box[1] * box[2] * box[3]; i < all; i++) {
    const uint32_t row = i / parts, c[4] = {i % parts * 8, row % box[1], row / box[1] % box[2], row / box[1] / box[2]};
    const unsigned char *from = map.x;
    bool inside = true;
    for (int d = 0; d < 4; d++) {
      const int64_t x = (int64_t)at[d] + c[d];
      inside &= x >= 0 && x < (int64_t)map.size[d];
      from += x * (int64_t)(d ? map.stride[d - 1] : 2);
    }
    Copy copy = {at_shared(swizzled(start + row * ATOM_BYTES + c[0] * 2)), from, 0, 16, 0, {}};
    if (inside) copy.bytes = (int)std::min<int64_t>(16, 2 * ((int64_t)map.size[0] - at[0] - c[0]));
    if (!in_shared(copy.to, 16)) fail("copy_box at line %d: writes outside of shared memory", place.line);
    if (copy.bytes)
      memcpy(copy.issued, from, (size_t)copy.bytes), note(*current, from, (size_t)copy.bytes, Access::read);
    note(*current, copy.to, 16, Access::arriving, {b.number, b.phase});
    memset(copy.to, 0xff, 16);
    b.copies.push_back(copy), b.bytes -= 16;
  }
  wake(b);
}
}  // namespace emulator
