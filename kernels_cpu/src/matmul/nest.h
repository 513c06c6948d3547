#pragma once

// Nested scales of 256 columns and what is summed under them, for *.kernels.cpp files.

#include "matmul/unpack.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// Goes through the headers of a panel with nested scales, for `kWidth` of its rows, or for several parts of so many from part `sub` on.
template <Code C, int Parts = 1>
class NestHeaders {
 public:
  MLXINFER_INLINE NestHeaders(const uint8_t* headers, int sub) : at_(headers), sub_(sub) {}

  MLXINFER_INLINE const uint8_t* at() const {
    return at_;
  }

  // Begins the next 256 columns: what their scales are multiples of.
  MLXINFER_INLINE void enter(F32 (&units)[Parts]) {
    take_units(units);
    if constexpr (nest_has_biases(C)) {
      take_units(bias_units_);
    }
  }
  MLXINFER_INLINE F32 enter() {
    static_assert(Parts == 1);
    F32 unit[1];
    enter(unit);
    return unit[0];
  }

  // The scales of the next group, then its biases.
  MLXINFER_INLINE void scales(I32 (&to)[Parts]) {
    take_counts(to);
  }
  MLXINFER_INLINE void biases(F32 (&to)[Parts]) {
    if constexpr (nest_has_biases(C)) {
      I32 counts[Parts];
      take_counts(counts);
      MLXINFER_UNROLL
      for (int part = 0; part < Parts; ++part) {
        to[part] = to_float(counts[part]) * bias_units_[part];
      }
    }
  }
  MLXINFER_INLINE I32 scale() {
    static_assert(Parts == 1);
    I32 to[1];
    scales(to);
    return to[0];
  }
  MLXINFER_INLINE F32 bias() {
    static_assert(Parts == 1);
    F32 to[1] = {};
    biases(to);
    return to[0];
  }

 private:
  MLXINFER_INLINE void take_units(F32 (&units)[Parts]) {
    MLXINFER_UNROLL
    for (int part = 0; part < Parts; ++part) {
      units[part] = load_scale(at_, Scale::f16, sub_ + part);
    }
    at_ += 2 * kPanelRows;
  }

  MLXINFER_INLINE void take_counts(I32 (&to)[Parts]) {
    MLXINFER_UNROLL
    for (int part = 0; part < Parts; ++part) {
      to[part] = load_signed_bytes(at_ + (sub_ + part) * kWidth);
    }
    at_ += kPanelRows;
  }

  const uint8_t* at_;
  const int sub_;
  F32 bias_units_[Parts] = {};
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
