#pragma once

#include <cstddef>

namespace mlxinfer::cpu {

// Replaces a piece of a mapping that nobody writes to by a copy in huge pages, at the same addresses, while others read from it: through
// the file cache's small pages, reading weights takes a tenth longer. The piece has at most 16 MB and begins at byte `from` of the
// mapping or up to a huge page later. Returns where the next one begins; `size` at the end, where memory is short, and anywhere but on Linux.
size_t into_huge_pages(const char* memory, size_t size, size_t from);

} // namespace mlxinfer::cpu
