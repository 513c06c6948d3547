// Memory of a launch: exact sizes (what lies beyond is AddressSanitizer's), NaN or uninitialised where a kernel has not written.
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
