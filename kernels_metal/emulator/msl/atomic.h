// Relaxed atomics in device and threadgroup memory: Metal has no other order.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed = 0 };

template <typename T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

// In mode "trace" atomics are told apart from other accesses.
#if EMU_TRACE
extern "C" void __emu_atomic(uint on);
struct __atomic_access {
  __atomic_access() { __emu_atomic(1); }
  ~__atomic_access() { __emu_atomic(0); }
};
#define EMU_ATOMICALLY __atomic_access __access;
#else
#define EMU_ATOMICALLY
#endif

#define EMU_FETCH(SPACE, NAME)                                                                        \
  template <typename T>                                                                               \
  inline T atomic_##NAME##_explicit(volatile SPACE atomic<T>* p, T x, memory_order) {                 \
    EMU_ATOMICALLY                                                                                    \
    return __atomic_##NAME(&p->value, x, __ATOMIC_RELAXED);                                           \
  }
#define EMU_ATOMIC(SPACE)                                                                             \
  EMU_FETCH(SPACE, fetch_add)                                                                         \
  EMU_FETCH(SPACE, fetch_sub)                                                                         \
  EMU_FETCH(SPACE, fetch_max)                                                                         \
  EMU_FETCH(SPACE, fetch_min)                                                                         \
  EMU_FETCH(SPACE, fetch_and)                                                                         \
  EMU_FETCH(SPACE, fetch_or)                                                                          \
  EMU_FETCH(SPACE, fetch_xor)                                                                         \
  template <typename T>                                                                               \
  inline T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order) {                    \
    EMU_ATOMICALLY T x;                                                                                              \
    __atomic_load(&p->value, &x, __ATOMIC_RELAXED);                                                   \
    return x;                                                                                         \
  }                                                                                                   \
  template <typename T>                                                                               \
  inline void atomic_store_explicit(volatile SPACE atomic<T>* p, T x, memory_order) {                 \
    EMU_ATOMICALLY __atomic_store(&p->value, &x, __ATOMIC_RELAXED);                                                  \
  }                                                                                                   \
  template <typename T>                                                                               \
  inline T atomic_exchange_explicit(volatile SPACE atomic<T>* p, T x, memory_order) {                 \
    EMU_ATOMICALLY T old;                                                                                            \
    __atomic_exchange(&p->value, &x, &old, __ATOMIC_RELAXED);                                         \
    return old;                                                                                       \
  }                                                                                                   \
  template <typename T>                                                                               \
  inline bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* p, thread T* expected,  \
                                                    T desired, memory_order, memory_order) {          \
    EMU_ATOMICALLY return __atomic_compare_exchange(&p->value, expected, &desired, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
  }
EMU_ATOMIC(device)
EMU_ATOMIC(threadgroup)
#undef EMU_ATOMIC
#undef EMU_FETCH

}  // namespace metal
