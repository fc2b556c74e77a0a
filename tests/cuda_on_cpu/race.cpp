/* The race check finds two unordered accesses to the same bytes, at least one of them a write. Accesses are ordered
 * within a thread, by a __syncthreads between them, within a warp by a __syncwarp between them; what TMA has copied by
 * the accessing thread's barrier_wait; and between blocks by atomic_add_acq_rel, called by the earlier block after its
 * access and by the later block before it accesses. Two atomics never race.
 *
 * Kernels compiled with -fsanitize=thread call the functions at the end for every access to memory. Those of the
 * sanitizer itself are not linked: it knows threads of the host, not these. */
#include <dlfcn.h>
#include <stdio.h>

#include <unordered_map>

#include "emulator.h"

namespace emulator {
namespace {
constexpr uint32_t NOBODY = ~0u;

/* The last access of one kind to two bytes; of several unordered ones, the properties of all. */
struct Record {
  uint32_t block = NOBODY, epoch = 0, warp_epoch = 0;
  uint16_t thread = 0;
  bool several_threads = false, several_warps = false, several_blocks = false, atomic = false, arriving = false;
  bool async = false;  /* by the asynchronous proxy */
  uint32_t fences = 0; /* else: of the thread, before this access */
  Phase phase = {0, 0};
};
struct Records {
  Record write, read;
};
constexpr uintptr_t PAGE = 4096;
std::unordered_map<uintptr_t, std::vector<Records>> global_accesses; /* by page */
std::vector<Records> shared_accesses;
bool checking;            /* whether any file is compiled for the check */
const void *code_address; /* after the last plain access */

/* A block's last release and first acquire; blocks are in the order of running. A release publishes all accesses before
 * its epoch and, within the epoch, one thread's. */
struct Exchange {
  bool released = false, acquired = false;
  uint32_t release_epoch = 0, acquire_epoch = 0;
  int release_thread = 0, acquire_thread = 0;
};
std::vector<Exchange> exchanges;

Exchange &exchange_of(uint32_t number) {
  if (exchanges.size() <= number) exchanges.resize(number + 1);
  return exchanges[number];
}

bool blocks_ordered(const Record &before, const Thread &thread) {
  const Exchange a = exchange_of(before.block), b = exchange_of(block.number);
  const bool published =
      a.released && (before.epoch < a.release_epoch || (before.thread == a.release_thread && !before.several_threads));
  const bool seen = b.acquired && (b.acquire_epoch < block.epoch || b.acquire_thread == thread.number);
  return published && seen && !before.several_blocks;
}

bool ordered(const Record &before, const Thread &thread, bool atomic) {
  if (before.block == NOBODY || (before.atomic && atomic)) return true;
  if (before.block != block.number || before.several_blocks) return blocks_ordered(before, thread);
  if (before.arriving) return false;
  if (before.phase.barrier && thread.waited[before.phase.barrier] >= before.phase.number) return true;
  if (before.epoch < block.epoch) return true;
  if (before.thread == thread.number && !before.several_threads) return true;
  const bool same_warp = before.thread / LANES == thread.number / LANES && !before.several_warps;
  return same_warp && before.warp_epoch < block.warp_epoch[thread.number / LANES];
}

Record merged(const Record &before, const Thread &thread, bool atomic) {
  const int warp = thread.number / LANES;
  Record now;
  now.block = block.number;
  now.epoch = block.epoch;
  now.warp_epoch = block.warp_epoch[warp];
  now.thread = (uint16_t)thread.number;
  now.atomic = atomic;
  now.fences = thread.fences;
  now.several_blocks = !atomic && before.block != NOBODY && (before.several_blocks || before.block != block.number);
  if (before.block == now.block && before.epoch == now.epoch) {
    now.several_warps = before.several_warps || before.thread / LANES != warp;
    const bool later = !now.several_warps && before.warp_epoch < now.warp_epoch;
    now.several_threads = !later && (before.several_threads || before.thread != now.thread);
  }
  return now;
}

[[noreturn]] void report_race(const void *at, const Record &before, const char *did, const Thread &thread,
                              Access access) {
  char name[64];
  if (in_shared(at, 1))
    snprintf(name, sizeof name, "byte %zu of shared", (size_t)(static_cast<const unsigned char *>(at) - block.shared));
  else
    snprintf(name, sizeof name, "%p in global", at);
  Dl_info code = {};
  dladdr(code_address, &code);
  const size_t offset =
      (size_t)(static_cast<const char *>(code_address) - static_cast<const char *>(code.dli_fbase)) - 1;
  fail(
      "race on %s memory: thread %d %s it, and %s%d of %s %s it; nothing orders the two (the last plain access: "
      "addr2line -Cfipe %s 0x%zx)",
      name, thread.number, access <= Access::read_async ? "reads" : "writes",
      before.several_threads ? "others up to thread " : "thread ", before.thread,
      before.block == block.number ? "its block" : "another block", before.arriving ? "has a copy under way to" : did,
      code.dli_fname ? code.dli_fname : "?", offset);
}

Records &global_records(const void *at) {
  static uintptr_t last = 0;
  static Records *records = nullptr; /* of the last page; vectors stay where they are when the map grows */
  const uintptr_t page = reinterpret_cast<uintptr_t>(at) / PAGE;
  if (page != last || global_accesses.empty()) {
    std::vector<Records> &all = global_accesses[page];
    if (all.empty()) all.resize(PAGE / 2);
    last = page, records = all.data();
  }
  return records[reinterpret_cast<uintptr_t>(at) % PAGE / 2];
}

/* at: the two bytes that `records` are of. */
void note_two(Records &records, const void *at, const Thread &thread, Access access, Phase phase) {
  const bool atomic = access == Access::atomic, async = access == Access::read_async || phase.barrier;
  const bool writes = access != Access::read && access != Access::read_async;
  const Record &wrote = records.write;
  if (async && wrote.block == block.number && !wrote.async && threads[wrote.thread].fences <= wrote.fences)
    fail("byte %zu of shared memory: thread %d wrote it and called no fence_proxy_async before TMA or wgmma",
         (size_t)(static_cast<const unsigned char *>(at) - block.shared), wrote.thread);
  if (access != Access::arrived && !ordered(records.write, thread, atomic))
    report_race(at, records.write, "wrote", thread, access);
  if (writes && !ordered(records.read, thread, false)) report_race(at, records.read, "read", thread, access);
  Record &mine = writes ? records.write : records.read;
  const bool joins = !writes || (atomic && mine.atomic);
  mine = merged(joins ? mine : Record(), thread, atomic);
  mine.arriving = access == Access::arriving;
  mine.async = async, mine.phase = phase;
}
}  // namespace

void begin_grid_accesses() {
  global_accesses.clear();
  exchanges.clear();
}

void begin_block_accesses() {
  if (checking) shared_accesses.assign(block.shared_bytes / 2 + 1, Records());
}

void note(const Thread &thread, const void *p, size_t size, Access access, Phase phase) {
  if (!checking) return;
  const unsigned char *end = static_cast<const unsigned char *>(p) + size;
  for (const unsigned char *at = end - size - reinterpret_cast<uintptr_t>(p) % 2; at < end; at += 2)
    note_two(in_shared(at, 1) ? shared_accesses[(size_t)(at - block.shared) / 2] : global_records(at), at, thread,
             access, phase);
}

void note_atomic(const void *p, size_t size, Sharing sharing) {
  check_aligned(p, size, "an atomic", {"", 0});
  if (on_a_stack(p)) fail("an atomic on a thread's own variable");
  note(*current, p, size, Access::atomic);
  if (sharing != Sharing::acquire_release) return;
  Exchange &mine = exchange_of(block.number);
  if (!mine.acquired) mine.acquire_epoch = block.epoch, mine.acquire_thread = current->number;
  mine.released = mine.acquired = true;
  mine.release_epoch = block.epoch, mine.release_thread = current->number;
}

namespace {
void touched(const void *p, size_t size, Access access, const void *code) {
  if (!current || on_a_stack(p)) return;
  code_address = code;
  note(*current, p, size, access);
}
}  // namespace
}  // namespace emulator

#define KV_HOOKS(bytes)                                                                \
  extern "C" void __tsan_read##bytes(void *p) {                                        \
    emulator::touched(p, bytes, emulator::Access::read, __builtin_return_address(0));  \
  }                                                                                    \
  extern "C" void __tsan_write##bytes(void *p) {                                       \
    emulator::touched(p, bytes, emulator::Access::write, __builtin_return_address(0)); \
  }                                                                                    \
  extern "C" void __tsan_unaligned_read##bytes(void *p) {                              \
    emulator::touched(p, bytes, emulator::Access::read, __builtin_return_address(0));  \
  }                                                                                    \
  extern "C" void __tsan_unaligned_write##bytes(void *p) {                             \
    emulator::touched(p, bytes, emulator::Access::write, __builtin_return_address(0)); \
  }
KV_HOOKS(1)
KV_HOOKS(2)
KV_HOOKS(4)
KV_HOOKS(8)
KV_HOOKS(16)
extern "C" void __tsan_read_range(void *p, size_t size) {
  emulator::touched(p, size, emulator::Access::read, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void *p, size_t size) {
  emulator::touched(p, size, emulator::Access::write, __builtin_return_address(0));
}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit(void) {}
extern "C" void __tsan_init(void) { emulator::checking = true; }
