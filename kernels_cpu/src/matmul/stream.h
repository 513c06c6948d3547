#pragma once

// Prefetching of a panel's bytes in the order in which products of one row read them, for *.kernels.cpp files.

#include "matmul/tile.h"
#include "simd/simd.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// Asks for memory evenly while a panel's blocks are read: for what is read `distance` bytes later, in this panel and then in the next one.
template <int64_t BlockBytes>
class PanelStream {
 public:
  MLXINFER_INLINE explicit PanelStream(const Panel& panel)
      : step_(panel.block_count == 0 ? 0 : panel.bytes / panel.block_count), own_(panel.bytes - panel.distance),
        here_(panel.headers + panel.distance), next_(panel.next - own_) {}

  // Once for each block.
  MLXINFER_INLINE void step() {
    prefetch<BlockBytes + 64>((at_ < own_ ? here_ : next_) + at_); // headers are a line a block, or less
    at_ += step_;
  }

 private:
  const int64_t step_, own_; // bytes: of a step, and of this panel that are asked for
  const uint8_t *here_, *next_;
  int64_t at_ = 0;
};

// Parts of a panel's rows that a tile multiplies together: all of them where a single row waits for memory, since the panel is then read once.
template <int Rows>
constexpr int kTogether = Rows == 1 ? kPanelRows / kWidth : 1;

} // namespace mlxinfer::cpu::MLXINFER_ISA
