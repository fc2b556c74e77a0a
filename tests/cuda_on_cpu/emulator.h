/* Shared by the emulator's files. One grid runs at a time, and in it one block at a time; a block's threads are
 * coroutines of one host thread. */
#ifndef KV_EMULATOR_H
#define KV_EMULATOR_H
#include <vector>

#include "ptx.h"

namespace emulator {
constexpr int LANES = 32, MOST_THREADS = 1024;
constexpr size_t MOST_SHARED = 101376;      /* the limit of a block on sm_86, sm_89 and sm_120 */
constexpr size_t MOST_SHARED_SM90 = 232448; /* and that of kernels with sm90 in their name */
constexpr int MOST_BARRIERS = 15;

/* A copy of 16 bytes into shared memory that is under way. */
struct Copy {
  unsigned char *to;
  const unsigned char *from;
  int bytes, size; /* read, and written */
  long group;
  unsigned char issued[16]; /* the content of `from` when the copy was issued */
};

/* A lane's part of a wgmma that is under way. */
struct Product {
  float (*d)[4];
  const uint32_t *a;
  uint32_t b;
  uint32_t a_issued[4];
  long group;
  std::vector<float> result;      /* what d will be */
  std::vector<uint16_t> b_issued; /* of the warp's first lane */
};

enum class State { ready, waiting, returned };

struct Thread {
  uint3 index;
  int number; /* in the block; lane = number % 32 */
  State state;
  void *stack_pointer;
  void *fake_stack;         /* AddressSanitizer's */
  const char *what;         /* the function it waits in */
  Place place;              /* where it waits */
  void *brought;            /* its argument of the collective it waits in */
  std::vector<Copy> copies; /* not yet waited for, oldest first */
  long groups;              /* of copies, committed */
  std::vector<Product> products;
  long product_groups;
  bool fenced;                        /* a wgmma_fence since the last wgmma_wait */
  uint32_t fences;                    /* fence_proxy_async */
  uint32_t waited[MOST_BARRIERS + 1]; /* the phases of each barrier that it has waited for */
};

struct Block {
  int threads;
  unsigned char *shared;
  size_t shared_bytes;
  uint32_t number;                          /* of this block, in the order of running */
  uint32_t epoch;                           /* barriers passed */
  uint32_t warp_epoch[LANES];               /* barriers that each warp passed */
  std::vector<uint32_t> brought[LANES / 4]; /* the operands of each warpgroup's products */
  size_t multiplied[LANES];                 /* how many of them each warp has brought */
};

extern Thread *current; /* null outside of kernels */
extern Block block;
extern Thread threads[MOST_THREADS];
inline Thread &neighbour(int lane) { return threads[current->number / LANES * LANES + lane]; }

/* Ends the launch with this message and the names of the kernel, the block and the thread. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The current thread waits until it is made ready. */
void wait_elsewhere(const char *what, Place place);
void make_ready(Thread &thread);
void begin_block_barriers();
extern const unsigned char *stacks_begin, *stacks_end;
inline bool on_a_stack(const void *p) { return p >= stacks_begin && p < stacks_end; }
inline bool in_shared(const void *p, size_t size) {
  const unsigned char *bytes = static_cast<const unsigned char *>(p);
  return bytes >= block.shared && bytes + size <= block.shared + block.shared_bytes;
}

/* race.cpp. The race check sees plain accesses only if the kernels are compiled with -fsanitize=thread. */
enum class Access { read, read_async, write, atomic, arriving, arrived }; /* the last two: a copy into shared memory */
/* A phase of a barrier, to which a copy belongs; {0, 0}: a copy by cp.async. */
struct Phase {
  uint16_t barrier;
  uint32_t number;
};
void note(const Thread &thread, const void *p, size_t size, Access access, Phase phase = {0, 0});
void begin_grid_accesses();
void begin_block_accesses();
}  // namespace emulator
#endif
