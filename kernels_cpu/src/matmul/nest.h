#pragma once

// Nested scales of 256 columns and what is summed under them, for *.kernels.cpp files.

#include "matmul/unpack.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// Goes through the headers of a panel with nested scales, for `kWidth` of its rows.
template <Code C>
class NestHeaders {
 public:
  MLXINFER_INLINE NestHeaders(const uint8_t* headers, int sub) : at_(headers), sub_(sub) {}

  MLXINFER_INLINE const uint8_t* at() const {
    return at_;
  }

  // Begins the next 256 columns: what their scales are multiples of.
  MLXINFER_INLINE F32 enter() {
    const F32 unit = load_scale(at_, Scale::f16, sub_);
    at_ += 2 * kPanelRows;
    if constexpr (nest_has_biases(C)) {
      bias_unit_ = load_scale(at_, Scale::f16, sub_);
      at_ += 2 * kPanelRows;
    }
    return unit;
  }

  // The scale of the next group, then its bias.
  MLXINFER_INLINE I32 scale() {
    const I32 count = load_signed_bytes(at_ + sub_ * kWidth);
    at_ += kPanelRows;
    return count;
  }
  MLXINFER_INLINE F32 bias() {
    if constexpr (!nest_has_biases(C)) {
      return F32{};
    } else {
      const I32 count = load_signed_bytes(at_ + sub_ * kWidth);
      at_ += kPanelRows;
      return to_float(count) * bias_unit_;
    }
  }

 private:
  const uint8_t* at_;
  const int sub_;
  F32 bias_unit_ = {};
};

// Sums by plane as one number; see NestedTile.
template <int Planes>
MLXINFER_INLINE F32 nest_sum(I32 first, I32 second) {
  if constexpr (Planes == 1) {
    return to_float(first);
  } else {
    return fma(to_float(first), broadcast(256.0f), to_float(second));
  }
}

} // namespace mlxinfer::cpu::MLXINFER_ISA
