/* The launches of decode and of short queries, by shape: a line "shape; kernel; blocks; threads; bytes of shared memory"
 * for each. The kernels are those of csrc, compiled for a CPU and not run; cuda_gate.py makes its table of waves from
 * this. */
#include <stdio.h>
#include <stdlib.h>

#include <string>

#include "kvevict.h"
#include "ptx.h"

namespace {
std::string shape;
constexpr int64_t SLOTS = 32768, HKV = 8, D = 128;
int32_t none; /* what no launch reads */

kv_slots slots() { return {&none, &none, &none, nullptr, &none}; }

template <class A, class Scratch, class Run>
void launched(const char *op, int64_t rows, int64_t G, const A &a, Scratch scratch, Run run) {
  shape = std::string(op) + ", " + std::to_string(rows) + (rows == 1 ? " row, " : " rows, ") + std::to_string(G) +
          (G == 1 ? " head a group" : " heads a group");
  void *memory = calloc(1, (size_t)scratch(&a) + 1);
  if (!memory || run(&a, memory, nullptr)) abort();
  free(memory);
}
}  // namespace

namespace emulator {
int run_grid(const char *function, dim3 grid, int threads, size_t shared, void (*)(void *), void *) {
  const std::string name = function, mark = "kernel = ";
  const size_t begin = name.find(mark) + mark.size();
  printf("%s; %s; %lld; %d; %zu\n", shape.c_str(), name.substr(begin, name.find_first_of(";]", begin) - begin).c_str(),
         (long long)grid.x * grid.y * grid.z, threads, shared);
  return 0;
}
}  // namespace emulator

int main() {
  for (int64_t G : {1, 4})
    for (int64_t T : {16, 64}) {
      kv_attend a = {};
      a.dtype = KV_BF16, a.B = 1, a.H = G * HKV, a.Hkv = HKV, a.T = a.S = T, a.D = D, a.scale = 1;
      a.slots = slots(), a.rows = SLOTS * HKV;
      launched("attend", T, G, a, kv_attend_cuda_scratch, kv_attend_cuda);
    }
  for (kv_kind kind : {KV_AS_COMPUTED, KV_INT8, KV_INT4})
    for (int64_t G : {1, 2, 3, 4, 8, 16, 64}) {
      kv_decode a = {};
      a.dtype = KV_BF16, a.B = 1, a.H = G * HKV, a.Hkv = HKV, a.D = D, a.scale = 1;
      a.slots = slots(), a.slots.k_kind = a.slots.v_kind = kind, a.rows = SLOTS * HKV;
      const char *const op = kind == KV_INT8 ? "decode of 8 bits" : kind == KV_INT4 ? "decode of 4 bits" : "decode";
      launched(op, 1, G, a, kv_decode_cuda_scratch, kv_decode_cuda);
    }
}
