/* Launches, coroutines, barriers and warp collectives.
 *
 * A thread runs until it waits for others; then another ready thread runs, in ascending or in random order. This shows
 * whether a result depends on the order of threads between barriers; race.cpp detects conflicts of single
 * accesses between two barriers. Blocks run one after another, also in either order: one that waits for another would
 * wait forever, as on a GPU that is full. Sums have the order of the code, not of a tensor core, and exp2_approx is
 * exact: tolerances must come from an analysis of rounding, not from errors measured here. */
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <string>

#include "stack.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
Thread *current;
Block block;
Thread threads[MOST_THREADS];
Usage usage;
const unsigned char *stacks_begin, *stacks_end;

namespace {
std::deque<Thread *> ready;
int waiting, returned; /* threads at the barrier; threads that have returned */
int holding, held;     /* threads with a true predicate at this barrier; at the last one */
int lanes_waiting[LANES];
bool shuffled_order;
std::mt19937 random_source;
std::string kernel_name, message;
bool failed;
Stacks stacks;

size_t drawn(size_t n) { return random_source() % n; }

void report(const std::string &text) {
  char where[64];
  snprintf(where, sizeof where, ", block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
  message =
      "kernel " + kernel_name + where + (current ? ", thread " + std::to_string(current->number) : "") + ": " + text;
  fprintf(stderr, "cuda_on_cpu: %s\n", message.c_str());
  failed = true;
}

std::string text_of(const char *what, Place place) {
  const char *name = strrchr(place.file, '/');
  return std::string(what) + " at " + (name ? name + 1 : place.file) + ":" + std::to_string(place.line);
}

bool same(const Thread &a, const Thread &b) {
  return a.place.line == b.place.line && !strcmp(a.what, b.what) && !strcmp(a.place.file, b.place.file);
}

Thread &next() {
  if (shuffled_order) std::swap(ready.front(), ready[drawn(ready.size())]);
  Thread &thread = *ready.front();
  ready.pop_front();
  return thread;
}

void wait_at(const char *what, Place place, void *mine) {
  current->state = State::waiting;
  current->what = what;
  current->place = place;
  current->brought = mine;
}

/* No thread can run: reports the waiting threads and their places. */
void report_deadlock() {
  std::map<std::string, int> groups;
  for (int i = 0; i < block.threads; i++)
    if (threads[i].state == State::waiting) groups[text_of(threads[i].what, threads[i].place)]++;
  std::string text = "not all threads came:";
  for (const auto &group : groups) text += " " + std::to_string(group.second) + " wait for " + group.first + ",";
  report(text + " " + std::to_string(returned) + " of " + std::to_string(block.threads) + " have returned");
}

void start_threads() {
  waiting = returned = holding = 0;
  std::fill(lanes_waiting, lanes_waiting + LANES, 0);
  ready.clear();
  for (int i = 0; i < block.threads; i++) {
    threads[i].index = {(unsigned)i, 0, 0};
    threads[i].number = i;
    threads[i].copies.clear();
    threads[i].groups = threads[i].product_groups = 0;
    threads[i].products.clear();
    threads[i].fenced = false, threads[i].fences = 0;
    std::fill(threads[i].waited, threads[i].waited + MOST_BARRIERS + 1, 0u);
    stacks.prepare(threads[i]);
    make_ready(threads[i]);
  }
}

void run_threads() {
  while (!ready.empty() && !failed) {
    current = &next();
    threadIdx = current->index;
    stacks.resume(*current);
    if (current->state == State::returned) returned++;
    current = nullptr;
  }
  if (!failed && returned < block.threads) report_deadlock();
}

/* Shared memory starts as NaN. It is exactly as large as asked for, between AddressSanitizer's guards or ours. */
void run_block(uint32_t number, size_t shared_bytes) {
  constexpr size_t GUARD = 4096;
  constexpr unsigned char MARK = 0xa5;
#ifdef __SANITIZE_ADDRESS__
  const size_t guard = 0;
#else
  const size_t guard = GUARD;
#endif
  void *memory = nullptr;
  if (posix_memalign(&memory, GUARD, shared_bytes + 2 * guard)) abort();
  unsigned char *bytes = static_cast<unsigned char *>(memory), *shared = bytes + guard;
  memset(memory, MARK, shared_bytes + 2 * guard);
  memset(shared, 0xff, shared_bytes);
  block = {(int)blockDim.x, shared, shared_bytes, number, 0, {}, {}, {}};
  begin_block_accesses();
  begin_block_barriers();
  start_threads();
  run_threads();
  for (size_t i = 0; i < guard && !failed; i++)
    if (shared[-1 - (long)i] != MARK || shared[shared_bytes + i] != MARK) report("wrote outside of its shared memory");
  free(memory);
}

std::string name_in(const std::string &function) {
  const size_t begin = function.find("kernel = ") + strlen("kernel = ");
  return function.substr(begin, function.find_first_of(";]", begin) - begin);
}
[[noreturn]] void stop() {
  stacks.leave(*current);
  abort(); /* a thread that failed is never resumed */
}

/* The stack of a thread that failed is never unwound, so it must not hold a string. */
[[noreturn]] void fail_to_meet(const char *how, const Thread &other) {
  report(how + text_of(other.what, other.place) + " and " + text_of(current->what, current->place));
  stop();
}
}  // namespace

void fail(const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  report(text);
  stop();
}

void make_ready(Thread &thread) {
  thread.state = State::ready;
  ready.push_back(&thread);
}

void wait_elsewhere(const char *what, Place place) {
  wait_at(what, place, nullptr);
  stacks.leave(*current);
}

void *block_shared() { return block.shared; }
int lane() { return current->number % LANES; }

int barrier(const char *what, Place place, bool predicate) {
  wait_at(what, place, nullptr);
  holding += predicate;
  if (++waiting == block.threads) {
    for (int i = 0; i < block.threads; i++)
      if (!same(threads[i], *current)) fail_to_meet("threads met at different barriers: ", threads[i]);
    held = holding;
    waiting = holding = 0;
    block.epoch++;
    for (int i = 0; i < block.threads; i++) make_ready(threads[i]);
  }
  stacks.leave(*current);
  return held;
}

void collective(const char *what, Place place, void *mine, void (*run)(void *const lanes[32])) {
  wait_at(what, place, mine);
  for (int i = 0; i < LANES; i++)
    if (neighbour(i).state == State::waiting && !same(neighbour(i), *current))
      fail_to_meet("lanes of a warp parted: ", neighbour(i));
  int &here = lanes_waiting[current->number / LANES];
  if (++here == LANES) {
    here = 0;
    void *brought[LANES];
    for (int i = 0; i < LANES; i++) brought[i] = neighbour(i).brought;
    run(brought);
    for (int i = 0; i < LANES; i++) make_ready(neighbour(i));
  }
  stacks.leave(*current);
}

void full(unsigned mask) {
  if (mask != ~0u) fail("a warp's functions are only to be called with all lanes, not 0x%x", mask);
}

void shuffle(void *const lanes[32]) {
  for (int i = 0; i < LANES; i++) {
    Shuffle &s = *static_cast<Shuffle *>(lanes[i]);
    s.result = static_cast<const Shuffle *>(lanes[s.source & (LANES - 1)])->value;
  }
}

void vote(void *const lanes[32]) {
  unsigned ballot = 0;
  for (int i = 0; i < LANES; i++) ballot |= (unsigned)static_cast<const Vote *>(lanes[i])->predicate << i;
  for (int i = 0; i < LANES; i++) static_cast<Vote *>(lanes[i])->ballot = ballot;
}

void warp_barrier(unsigned mask, Place place) {
  full(mask);
  collective("__syncwarp", place, nullptr, [](void *const *) { block.warp_epoch[current->number / LANES]++; });
}

void set_order(unsigned seed) {
  shuffled_order = seed != 0;
  random_source.seed(seed);
}

int run_grid(const char *function, dim3 grid, int threads_of_block, size_t shared, void (*call)(void *),
             void *arguments) {
  kernel_name = name_in(function);
  message.clear();
  failed = false;
  const size_t most = kernel_name.find("sm90") == std::string::npos ? MOST_SHARED : MOST_SHARED_SM90;
  if (threads_of_block < LANES || threads_of_block > MOST_THREADS || threads_of_block % LANES || shared > most ||
      !grid.x || !grid.y || !grid.z || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) {
    report("no GPU can run a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
           std::to_string(grid.z) + " blocks of " + std::to_string(threads_of_block) + " threads with " +
           std::to_string(shared) + " bytes of shared memory");
    return cudaErrorInvalidConfiguration;
  }
  usage.shared = std::max(usage.shared, shared);
  gridDim = grid;
  blockDim = dim3((unsigned)threads_of_block);
  stacks.start(call, arguments);
  begin_grid_accesses();
  std::vector<unsigned> order((size_t)grid.x * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0u);
  if (shuffled_order) std::shuffle(order.begin(), order.end(), random_source);
  for (size_t i = 0; i < order.size() && !failed; i++) {
    blockIdx = {order[i] % grid.x, order[i] / grid.x % grid.y, order[i] / grid.x / grid.y};
    run_block((uint32_t)i, shared);
  }
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}
}  // namespace emulator

/* The error message of the last launch. */
const char *cudaGetErrorString(cudaError_t error) { return error ? emulator::message.c_str() : "no error"; }
