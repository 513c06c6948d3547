// Memory of a launch: exact sizes (what lies beyond is AddressSanitizer's), NaN or uninitialised where a kernel has not written.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

#if EMU_MSAN
#include <sanitizer/msan_interface.h>
extern "C" const int __msan_track_origins = 2;  // as kernels are compiled; instrumented programs have this by themselves
#endif

extern "C" int __emu_zero() { return 0; }

void array_forget(const Array& array, [[maybe_unused]] uint32_t origin) {
  memset(array.at, 0xFF, array.bytes);
#if EMU_MSAN
  __msan_poison(array.at, array.bytes);
  __msan_set_origin(array.at, array.bytes, origin);
#endif
}

Buffer buffer_make(uint64_t bytes, Kind kind) {
  Buffer b = {(char*)malloc(bytes), bytes, kind};
  if (!b.at && bytes) fail("crash", "no memory for a buffer of %lu bytes", bytes);
  memset(b.at, 0xFF, bytes);
#if EMU_MSAN
  __msan_poison(b.at, bytes);
  __msan_set_origin(b.at, bytes, 0);
#endif
  return b;
}

void buffer_ready([[maybe_unused]] const Buffer& buffer) {
#if EMU_MSAN
  __msan_unpoison(buffer.at, buffer.bytes);
#endif
}

void buffer_check([[maybe_unused]] const Buffer& buffer, [[maybe_unused]] uint32_t index) {
#if EMU_MSAN
  if (buffer.kind == Kind::input) return;
  const intptr_t at = __msan_test_shadow(buffer.at, buffer.bytes);
  if (at < 0) return;
  if (__msan_get_origin(buffer.at + at)) __msan_check_mem_is_initialized(buffer.at + at, 1);  // ends with a report on where it came from
  fail("unwritten", "%u %ld", index, at);
#endif
}

// Calls of these are put before every shift in mode "asan"; the caller becomes a line of the source.
static void check_shift(uint64_t distance, uint64_t most, const void* code) {
  if (distance <= most) return;
  Dl_info library = {};
  dladdr(code, &library);
  const size_t place = size_t((const char*)code - (const char*)library.dli_fbase);
  fail("undefined", "%zu shift by %ld in an integer of %lu bits", place, int64_t(distance), most + 1);
}
extern "C" void __emu_shift32(int32_t distance, uint32_t most) { check_shift(uint64_t(int64_t(distance)), most, __builtin_return_address(0)); }
extern "C" void __emu_shift64(uint64_t distance, uint64_t most) { check_shift(distance, most, __builtin_return_address(0)); }
