/* Coroutines: a stack for each thread of a block, and the switch between one of them and the host's. */
#ifndef KV_STACK_H
#define KV_STACK_H
#include <stdlib.h>
#include <sys/mman.h>

#include "emulator.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#error "the switch between coroutines is written for x86-64"
#endif

/* Saves the callee-saved registers on this stack and its pointer in *from; continues where `to` was saved. */
extern "C" void kv_switch(void **from, void *to);
asm(R"(
.text
.type kv_switch, @function
kv_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kv_switch, .-kv_switch
)");

namespace emulator {
class Stacks {
 public:
  /* Threads that are prepared from now on run call(arguments). */
  void start(void (*call)(void *), void *arguments) {
    this->call = call;
    this->arguments = arguments;
    if (memory) return;
    void *got = mmap(nullptr, BYTES * MOST_THREADS, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (got == MAP_FAILED) abort();
    stacks_begin = memory = static_cast<unsigned char *>(got);
    stacks_end = memory + BYTES * MOST_THREADS;
    for (int i = 0; i < MOST_THREADS; i++) mprotect(memory + i * BYTES, PAGE, PROT_NONE);
  }

  void prepare(Thread &thread) {
    self = this;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(bottom(thread), BYTES - PAGE); /* poisoned by a thread that failed */
#endif
    /* Six registers for kv_switch to restore, its return address, and a return address for run. */
    void **top = reinterpret_cast<void **>(memory + (thread.number + 1) * BYTES) - 8;
    for (int i = 0; i < 8; i++) top[i] = nullptr;
    top[6] = reinterpret_cast<void *>(run);
    thread.stack_pointer = top;
    thread.fake_stack = nullptr;
  }

  void resume(Thread &thread) {
#ifdef __SANITIZE_ADDRESS__
    void *fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, bottom(thread), BYTES - PAGE);
#endif
    kv_switch(&host_stack_pointer, thread.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  /* From `thread`, the current one, back to the caller of resume. */
  void leave(Thread &thread) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&thread.fake_stack, host_bottom, host_bytes);
#endif
    kv_switch(&thread.stack_pointer, host_stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(thread.fake_stack, &host_bottom, &host_bytes);
#endif
  }

 private:
  static constexpr size_t BYTES = 256 * 1024, PAGE = 4096; /* of each stack; the last page is its guard */

  static void run() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &self->host_bottom, &self->host_bytes);
#endif
    self->call(self->arguments);
    current->state = State::returned;
    self->leave(*current);
  }
  const void *bottom(const Thread &thread) const { return memory + thread.number * BYTES + PAGE; }

  static inline Stacks *self;
  unsigned char *memory = nullptr;
  void (*call)(void *) = nullptr;
  void *arguments = nullptr, *host_stack_pointer = nullptr;
  const void *host_bottom = nullptr;
  size_t host_bytes = 0;
};
}  // namespace emulator
#endif
