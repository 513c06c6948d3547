#include "memory/slabs.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mlxinfer::cpu {

namespace {

constexpr size_t kHugePage = size_t{2} << 20, kLeastSlab = size_t{32} << 20;

size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

} // namespace

struct Slab {
  explicit Slab(size_t bytes) : size(bytes), memory(static_cast<char*>(std::aligned_alloc(kHugePage, bytes))) {
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
#ifdef __linux__
    madvise(memory, size, MADV_HUGEPAGE);
#endif
  }
  ~Slab() {
    std::free(memory);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  const size_t size;
  char* const memory;
  size_t used = 0;
};

namespace {

std::mutex mutex;
std::weak_ptr<Slab> current; // where the next weights go if there is room
std::shared_ptr<Slab> reserved; // keeps `current` until weights do

void clear_pages([[maybe_unused]] const std::weak_ptr<Slab>& weak, [[maybe_unused]] size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  for (size_t at = 0; at < bytes; at += kHugePage) {
    const auto slab = weak.lock();
    if (!slab || madvise(slab->memory + at, kHugePage, MADV_POPULATE_WRITE) != 0) {
      return;
    }
  }
#endif
}

} // namespace

Place weight_memory(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  bytes = rounded(bytes, kAlignment);
  auto slab = current.lock();
  if (!slab || slab->size - slab->used < bytes) {
    slab = std::make_shared<Slab>(std::max(kLeastSlab, rounded(bytes, kHugePage)));
    if (bytes < kLeastSlab) {
      current = slab;
    }
  }
  slab->used += bytes;
  return {slab, slab->memory + slab->used - bytes};
}

void reserve_weight_memory(size_t bytes) {
  auto slab = std::make_shared<Slab>(rounded(std::max(bytes, kLeastSlab), kHugePage));
  {
    std::lock_guard<std::mutex> lock(mutex);
    reserved = slab;
    current = slab;
  }
  try {
    std::thread([weak = std::weak_ptr<Slab>(slab), bytes] { clear_pages(weak, bytes); }).detach();
  } catch (const std::system_error&) { // no more threads: whoever writes there first clears it
  }
}

void release_weight_memory() {
  std::lock_guard<std::mutex> lock(mutex);
  reserved.reset();
}

} // namespace mlxinfer::cpu
