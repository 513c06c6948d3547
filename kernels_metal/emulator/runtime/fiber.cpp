// Fibers: a stack each, a switch of six registers, and what each sanitizer wants to be told about it.
#include <stdlib.h>
#include <sys/mman.h>

#include "device.h"

#if EMU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#if EMU_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* token);
void __tsan_release(void* token);
}
constexpr unsigned WITHOUT_ORDER = 1;  // a switch is no synchronisation: only barriers are
#endif

namespace {

#if EMU_FAST
constexpr size_t STACK = 128 << 10;
#else
constexpr size_t STACK = 512 << 10;
#endif
constexpr size_t GUARD = 4096;

struct Fiber {
  void* stack_pointer;
  char* stack;
  void (*body)();
  void* asan_stack;
  void* tsan;
};

Fiber fibers[MAX_THREADS];
void* scheduler_stack_pointer;
[[maybe_unused]] void* scheduler_tsan;
[[maybe_unused]] void* scheduler_asan_stack;
[[maybe_unused]] const void* scheduler_bottom;
[[maybe_unused]] size_t scheduler_size;
uint32_t starting;

void entered() {
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
  fibers[starting].body();
  abort();  // the body's last act is to pause for good
}

}  // namespace

extern "C" void emu_switch(void** save, void* to);
asm(R"(.text
.globl emu_switch
emu_switch:
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
)");

void fiber_prepare(uint32_t index, void (*body)()) {
  Fiber& f = fibers[index];
  if (!f.stack) {
    char* all = (char*)mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) fail("crash", "no memory for the stacks of %u threads", index + 1);
    mprotect(all, GUARD, PROT_NONE);
    f.stack = all + GUARD;
#if EMU_TSAN
    f.tsan = __tsan_create_fiber(0);
    scheduler_tsan = __tsan_get_current_fiber();
#endif
  }
  f.body = body;
  f.asan_stack = nullptr;
  // Staggered, or the same variable of all threads would fall into the same few lines of the cache.
  void** top = (void**)(f.stack + STACK - 64 - index % 64 * 320);
  *--top = nullptr;  // no return address: the stack is aligned as at a call
  *--top = (void*)entered;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  f.stack_pointer = top;
}

void fiber_resume(uint32_t index) {
  Fiber& f = fibers[index];
  starting = index;
#if EMU_ASAN
  __sanitizer_start_switch_fiber(&scheduler_asan_stack, f.stack, STACK);
#endif
#if EMU_TSAN
  __tsan_switch_to_fiber(f.tsan, WITHOUT_ORDER);
#endif
  emu_switch(&scheduler_stack_pointer, f.stack_pointer);
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(scheduler_asan_stack, nullptr, nullptr);
#endif
}

void fiber_pause(uint32_t index, [[maybe_unused]] bool ended) {
  Fiber& f = fibers[index];
#if EMU_ASAN
  __sanitizer_start_switch_fiber(ended ? nullptr : &f.asan_stack, scheduler_bottom, scheduler_size);
#endif
#if EMU_TSAN
  __tsan_switch_to_fiber(scheduler_tsan, WITHOUT_ORDER);
#endif
  emu_switch(&f.stack_pointer, scheduler_stack_pointer);
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(f.asan_stack, &scheduler_bottom, &scheduler_size);
#endif
}

void order_release([[maybe_unused]] void* token) {
#if EMU_TSAN
  __tsan_release(token);
#endif
}

void order_acquire([[maybe_unused]] void* token) {
#if EMU_TSAN
  __tsan_acquire(token);
#endif
}
