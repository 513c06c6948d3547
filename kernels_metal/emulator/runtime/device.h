// What the parts of the runtime share. One process runs one launch at a time, one thread of the kernel (a fiber) at a time.
#pragma once
#include <stddef.h>
#include <stdint.h>

// As __emu_thread in msl/types.h.
struct Thread {
  uint32_t position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint32_t grid[3], threads[3], dispatched[3], threadgroups[3];
  uint32_t lane, simdgroup, simdgroups, dispatched_simdgroups, index;
  const size_t* arguments;
};

constexpr uint32_t LANES = 32, MAX_THREADS = 1024, THREADGROUP_BYTES = 32 * 1024;

enum class Order : uint32_t { forward, reversed, random };

// A threadgroup array of the kernel; the compiled kernel ends with a table of these.
struct Array {
  char* at;
  uint64_t bytes;
  const char* name;
};

enum class Kind : uint32_t { input, output, prefilled };

struct Buffer {
  char* at;
  uint64_t bytes;
  Kind kind;
};

struct Launch {
  void (*kernel)();
  const Array* arrays;
  uint64_t array_count;
  uint32_t grid[3], threadgroup[3];
  Order order;
  uint64_t seed;
  const size_t* arguments;
  uint32_t origin;  // what MemorySanitizer calls threadgroup memory that was never written
};

// Sends "kind, newline, text" as the answer to the launch and ends the process: half-run fibers cannot be taken further.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// scheduler.cpp
void run(const Launch& launch);
extern "C" const Thread* __emu_self();  // the one that runs

// fiber.cpp
void fiber_prepare(uint32_t index, void (*body)());
void fiber_resume(uint32_t index);             // from the scheduler to a fiber, until it pauses
void fiber_pause(uint32_t index, bool ended);  // back to the scheduler
void order_release(void* token);               // what came before is seen by whoever acquires later (ThreadSanitizer)
void order_acquire(void* token);

// buffers.cpp
void array_forget(const Array& array, uint32_t origin);  // as at the start of a threadgroup: NaN, and uninitialised to MemorySanitizer
Buffer buffer_make(uint64_t bytes, Kind kind);
void buffer_ready(const Buffer& buffer);  // written from outside
void buffer_check(const Buffer& buffer, uint32_t index);

// trace.cpp
struct Traffic {
  uint64_t loaded, stored, fetched, distinct_loaded, distinct_stored, most_loads, most_stores;
};
void trace_begin(const Buffer* buffers, uint32_t count, const Array* arrays, uint64_t array_count);
void trace_threadgroup(uint32_t index);
void trace_barrier(uint32_t flags, bool whole_threadgroup, uint32_t simdgroup);
Traffic traffic_of(uint32_t buffer);
