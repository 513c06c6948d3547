// Mode "trace": the compiler calls these for every access to memory (as for the kernel's AddressSanitizer, whose own checks are not there).
// Each byte knows how often it was loaded and stored, and who did so last: an access is a race if another thread's earlier one is not kept
// apart from it by a barrier for that memory, or if it was another threadgroup's.
#include "device.h"

#if EMU_TRACE
#include <dlfcn.h>
#include <string.h>

#include <algorithm>
#include <vector>

namespace {

enum Memory : uint32_t { DEVICE, THREADGROUP };  // bits of mem_flags

struct Access {
  uint32_t threadgroup, thread, barriers, simdgroup_barriers;  // threadgroup: 1 + index, 0 for none
  const void* code;
  bool atomic;
};

// Of the readers: the last one, the last other thread, the last thread of another simdgroup.
struct History {
  Access writer, reader, other_reader, far_reader;
};

struct Count {
  uint32_t loads, stores, reader;  // reader: threadgroup
};

struct Region {
  char* at;
  uint64_t bytes;
  Memory memory;
  const char* array;  // its name; buffers are known by their number
  bool constant;      // nobody can write, so nobody races
  std::vector<Count> counts;
  std::vector<History> histories;
  Traffic traffic;
};

std::vector<Region> regions;
uint32_t threadgroup;
uint32_t barriers[2], simdgroup_barriers[2][MAX_THREADS / LANES];  // how many there have been, for each memory
bool atomic;

Region* find(const char* at) {
  const ptrdiff_t from_here = at - (const char*)__builtin_frame_address(0);
  if (from_here > -(64 << 10) && from_here < (64 << 10)) return nullptr;  // the thread's own variables: most accesses
  for (Region& r : regions)
    if (size_t(at - r.at) < r.bytes) return &r;
  return nullptr;
}

size_t place_of(const void* code) {
  Dl_info library = {};
  dladdr(code, &library);
  return size_t((const char*)code - (const char*)library.dli_fbase);
}

// The caller of a hook is the access itself: its place in the compiled kernel becomes a line of the source later.
void check(const Region& r, size_t offset, const Access& before, const char* did, const Access& now, const char* does) {
  if (!before.threadgroup || (before.atomic && now.atomic)) return;
  const bool same_group = before.threadgroup == now.threadgroup;
  if (same_group) {
    const bool same_simdgroup = before.thread / LANES == now.thread / LANES;
    if (before.thread == now.thread || before.barriers != now.barriers) return;
    if (same_simdgroup && before.simdgroup_barriers != now.simdgroup_barriers) return;
  } else if (r.memory == THREADGROUP) {
    return;  // another threadgroup's is another memory
  }
  const uint32_t one = same_group ? now.thread : now.threadgroup - 1, other = same_group ? before.thread : before.threadgroup - 1;
  fail(same_group ? "race" : "two threadgroups", "%zu %zu %zu %zu %u %u %s %s %s", size_t(&r - regions.data()), offset, place_of(now.code),
       place_of(before.code), one, other, does, did, r.array);
}

Access access_now(const Region& r, const void* code) {
  const Thread& t = *__emu_self();
  return {threadgroup, t.index, barriers[r.memory], simdgroup_barriers[r.memory][t.simdgroup], code, atomic};
}

void load(const char* at, size_t size, const void* code) {
  Region* r = find(at);
  if (!r) return;
  r->traffic.loaded += size;
  const size_t begin = size_t(at - r->at), end = std::min<size_t>(begin + size, r->bytes);
  for (size_t i = begin; i < end; i++) {
    Count& c = r->counts[i];
    r->traffic.fetched += c.reader != threadgroup;
    c.loads++, c.reader = threadgroup;
  }
  if (r->constant) return;
  const Access now = access_now(*r, code);
  for (size_t i = begin; i < end; i++) {
    History& h = r->histories[i];
    check(*r, i, h.writer, "stored", now, "loads");
    if (h.reader.thread != now.thread) h.other_reader = h.reader;
    if (h.reader.thread / LANES != now.thread / LANES) h.far_reader = h.reader;
    h.reader = now;
  }
}

void store(const char* at, size_t size, const void* code) {
  Region* r = find(at);
  if (!r) return;
  r->traffic.stored += size;
  const size_t begin = size_t(at - r->at), end = std::min<size_t>(begin + size, r->bytes);
  for (size_t i = begin; i < end; i++) r->counts[i].stores++;
  if (r->constant) return;
  const Access now = access_now(*r, code);
  for (size_t i = begin; i < end; i++) {
    History& h = r->histories[i];
    check(*r, i, h.writer, "stored", now, "stores");
    for (const Access& reader : {h.reader, h.other_reader, h.far_reader}) check(*r, i, reader, "loaded", now, "stores");
    h.writer = now;
  }
}

}  // namespace

#define EMU_CALLER __builtin_return_address(0)
extern "C" {
#define EMU_SIZED(N)                                                                      \
  void __asan_load##N##_noabort(const char* at) { load(at, N, EMU_CALLER); }              \
  void __asan_store##N##_noabort(const char* at) { store(at, N, EMU_CALLER); }
EMU_SIZED(1) EMU_SIZED(2) EMU_SIZED(4) EMU_SIZED(8) EMU_SIZED(16)
void __asan_loadN_noabort(const char* at, size_t size) { load(at, size, EMU_CALLER); }
void __asan_storeN_noabort(const char* at, size_t size) { store(at, size, EMU_CALLER); }
void* __asan_memcpy(void* to, const void* from, size_t size) {
  load((const char*)from, size, EMU_CALLER);
  store((const char*)to, size, EMU_CALLER);
  return memcpy(to, from, size);
}
void* __asan_memmove(void* to, const void* from, size_t size) {
  load((const char*)from, size, EMU_CALLER);
  store((const char*)to, size, EMU_CALLER);
  return memmove(to, from, size);
}
void* __asan_memset(void* to, int value, size_t size) {
  store((const char*)to, size, EMU_CALLER);
  return memset(to, value, size);
}
void __asan_handle_no_return() {}
void __emu_atomic(uint32_t on) { atomic = on != 0; }
}

void trace_begin(const Buffer* buffers, uint32_t count, const Array* arrays, uint64_t array_count) {
  regions.clear();
  for (uint32_t i = 0; i < count; i++)
    regions.push_back({buffers[i].at, buffers[i].bytes, DEVICE, "", buffers[i].kind == Kind::input, {}, {}, {}});
  for (uint64_t i = 0; i < array_count; i++) regions.push_back({arrays[i].at, arrays[i].bytes, THREADGROUP, arrays[i].name, false, {}, {}, {}});
  for (Region& r : regions) {
    r.counts.resize(r.bytes);
    r.histories.resize(r.constant ? 0 : r.bytes);
  }
}

void trace_threadgroup(uint32_t index) { threadgroup = index + 1; }

void trace_barrier(uint32_t flags, bool whole_threadgroup, uint32_t simdgroup) {
  for (const uint32_t memory : {DEVICE, THREADGROUP})
    if (flags >> memory & 1) ++(whole_threadgroup ? barriers[memory] : simdgroup_barriers[memory][simdgroup]);
}

Traffic traffic_of(uint32_t buffer) {
  Traffic t = regions[buffer].traffic;
  for (const Count& c : regions[buffer].counts) {
    t.distinct_loaded += c.loads > 0;
    t.distinct_stored += c.stores > 0;
    t.most_loads = std::max<uint64_t>(t.most_loads, c.loads);
    t.most_stores = std::max<uint64_t>(t.most_stores, c.stores);
  }
  return t;
}

#else

void trace_begin(const Buffer*, uint32_t, const Array*, uint64_t) {}
void trace_threadgroup(uint32_t) {}
void trace_barrier(uint32_t, bool, uint32_t) {}
Traffic traffic_of(uint32_t) { return {}; }

#endif
