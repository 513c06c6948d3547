// Mode "trace": the compiler calls these for every access to memory (as for the kernel's AddressSanitizer, whose own checks are not there).
// Each byte of each buffer knows how often it was loaded and stored, and which threadgroup did so last.
#include "device.h"

#if EMU_TRACE
#include <dlfcn.h>
#include <string.h>

#include <algorithm>
#include <vector>

namespace {

struct Byte {
  uint32_t loads, stores, reader, writer;  // reader, writer: 1 + index of the threadgroup, 0 for none
};

struct Watched {
  Buffer buffer;
  std::vector<Byte> bytes;
  Traffic traffic;
};

std::vector<Watched> watched;
uint32_t threadgroup;
bool conflicts_matter;

Watched* find(const char* at) {
  static size_t last = 0;
  for (size_t i = 0; i < watched.size(); i++) {
    Watched& w = watched[(last + i) % watched.size()];
    if (at >= w.buffer.at && at < w.buffer.at + w.buffer.bytes) {
      last = &w - watched.data();
      return &w;
    }
  }
  return nullptr;
}

// The caller is the access itself: its place in the compiled kernel becomes a line of the source later.
[[noreturn]] void conflict(const Watched& w, size_t offset, uint32_t other, const char* what, void* code) {
  Dl_info library = {};
  dladdr(code, &library);
  const size_t place = (const char*)code - (const char*)library.dli_fbase;
  fail("two threadgroups", "%zu %zu %u %u %zu %s", size_t(&w - watched.data()), offset, threadgroup - 1, other - 1, place, what);
}

void load(const char* at, size_t size, void* code) {
  Watched* w = find(at);
  if (!w) return;
  w->traffic.loaded += size;
  const size_t begin = at - w->buffer.at, end = std::min<size_t>(begin + size, w->buffer.bytes);
  for (size_t i = begin; i < end; i++) {
    Byte& b = w->bytes[i];
    w->traffic.fetched += b.reader != threadgroup;
    if (conflicts_matter && b.writer && b.writer != threadgroup) conflict(*w, i, b.writer, "loads what the other has stored", code);
    b.loads++, b.reader = threadgroup;
  }
}

void store(const char* at, size_t size, void* code) {
  Watched* w = find(at);
  if (!w) return;
  w->traffic.stored += size;
  const size_t begin = at - w->buffer.at, end = std::min<size_t>(begin + size, w->buffer.bytes);
  for (size_t i = begin; i < end; i++) {
    Byte& b = w->bytes[i];
    if (conflicts_matter && b.writer && b.writer != threadgroup) conflict(*w, i, b.writer, "stores where the other has stored", code);
    if (conflicts_matter && b.reader && b.reader != threadgroup) conflict(*w, i, b.reader, "stores where the other has loaded", code);
    b.stores++, b.writer = threadgroup;
  }
}

}  // namespace

extern "C" {
#define EMU_SIZED(N)                                                                                             \
  void __asan_load##N##_noabort(const char* at) { load(at, N, __builtin_return_address(0)); }                   \
  void __asan_store##N##_noabort(const char* at) { store(at, N, __builtin_return_address(0)); }
EMU_SIZED(1) EMU_SIZED(2) EMU_SIZED(4) EMU_SIZED(8) EMU_SIZED(16)
void __asan_loadN_noabort(const char* at, size_t size) { load(at, size, __builtin_return_address(0)); }
void __asan_storeN_noabort(const char* at, size_t size) { store(at, size, __builtin_return_address(0)); }
void* __asan_memcpy(void* to, const void* from, size_t size) {
  load((const char*)from, size, __builtin_return_address(0));
  store((const char*)to, size, __builtin_return_address(0));
  return memcpy(to, from, size);
}
void* __asan_memmove(void* to, const void* from, size_t size) {
  load((const char*)from, size, __builtin_return_address(0));
  store((const char*)to, size, __builtin_return_address(0));
  return memmove(to, from, size);
}
void* __asan_memset(void* to, int value, size_t size) {
  store((const char*)to, size, __builtin_return_address(0));
  return memset(to, value, size);
}
void __asan_handle_no_return() {}
}

void traffic_begin(const Buffer* buffers, uint32_t count, bool checked) {
  watched.clear();
  conflicts_matter = checked;
  for (uint32_t i = 0; i < count; i++) watched.push_back({buffers[i], std::vector<Byte>(buffers[i].bytes), {}});
}

void traffic_threadgroup(uint32_t index) { threadgroup = index + 1; }

Traffic traffic_of(uint32_t index) {
  Traffic t = watched[index].traffic;
  for (const Byte& b : watched[index].bytes) {
    t.distinct_loaded += b.loads > 0;
    t.distinct_stored += b.stores > 0;
    t.most_loads = std::max<uint64_t>(t.most_loads, b.loads);
    t.most_stores = std::max<uint64_t>(t.most_stores, b.stores);
  }
  return t;
}

void traffic_end() { watched.clear(); }

#else

void traffic_begin(const Buffer*, uint32_t, bool) {}
void traffic_threadgroup(uint32_t) {}
Traffic traffic_of(uint32_t) { return {}; }
void traffic_end() {}

#endif
