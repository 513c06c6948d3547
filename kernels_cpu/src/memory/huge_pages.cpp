#include "memory/huge_pages.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mlxinfer::cpu {

#ifdef __linux__
namespace {

constexpr size_t kHugePage = size_t{2} << 20, kPiece = 8 * kHugePage;

char* aligned_up(const char* at) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(at) + kHugePage - 1) / kHugePage * kHugePage);
}

// Both ends are multiples of huge pages.
bool replace(char* from, size_t bytes) {
  const size_t room = bytes + kHugePage;
  void* fresh = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) {
    return false;
  }
  char *begin = static_cast<char*>(fresh), *copy = aligned_up(begin), *end = begin + room;
  madvise(copy, bytes, MADV_HUGEPAGE);
  std::memcpy(copy, from, bytes);
  // The kernel moves it in one step: who reads meanwhile waits, and finds the same bytes.
  const bool moved = mprotect(copy, bytes, PROT_READ) == 0 && mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, from) != MAP_FAILED;
  if (!moved) {
    munmap(begin, room);
    return false;
  }
  if (copy > begin) {
    munmap(begin, static_cast<size_t>(copy - begin));
  }
  if (end > copy + bytes) {
    munmap(copy + bytes, static_cast<size_t>(end - copy) - bytes);
  }
  return true;
}

} // namespace

size_t into_huge_pages(const char* memory, size_t size, size_t from) {
  char* at = aligned_up(memory + std::min(from, size));
  const char* end = memory + size;
  if (end - at < static_cast<std::ptrdiff_t>(kHugePage)) {
    return size;
  }
  const size_t bytes = std::min(kPiece, static_cast<size_t>(end - at) / kHugePage * kHugePage);
  return replace(at, bytes) ? static_cast<size_t>(at + bytes - memory) : size;
}
#else
size_t into_huge_pages(const char*, size_t size, size_t) {
  return size;
}
#endif

} // namespace mlxinfer::cpu
