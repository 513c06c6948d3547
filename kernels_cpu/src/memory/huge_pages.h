#pragma once

#include <cstddef>

namespace mlxinfer::cpu {

// Replaces a mapping that nobody writes to by a copy in huge pages, at the same addresses, while others read from it: through the file
// cache's small pages, reading weights takes a tenth longer. Stops where memory is short. Does nothing but on Linux.
void into_huge_pages(const char* memory, size_t size);

} // namespace mlxinfer::cpu
