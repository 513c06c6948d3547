#pragma once

#include <cstddef>
#include <memory>

namespace mlxinfer::cpu {

constexpr size_t kAlignment = 64;

struct Slab;

// Memory for weights, uninitialized, at a multiple of 64 bytes. It lies in slabs that ask for huge pages; one is given back when
// the last part of it is let go.
struct Place {
  std::shared_ptr<Slab> slab;
  char* memory;
};
Place weight_memory(size_t bytes);

// The next `bytes` of weight memory come from one slab, which the kernel clears in another thread from now on: that takes as long
// as packing, and can be done while a file's header and vocabulary are read. Bad memory shows when it is used.
void reserve_weight_memory(size_t bytes);
// What was reserved and not used is not kept for later.
void release_weight_memory();

} // namespace mlxinfer::cpu
