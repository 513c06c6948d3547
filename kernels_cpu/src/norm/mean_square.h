#pragma once

// For *.kernels.cpp files.

#include "simd/floats.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

template <typename T>
MLXINFER_INLINE float mean_square(const T* x, int64_t size) {
  F32 sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    MLXINFER_UNROLL
    for (int j = 0; j < 4; ++j) {
      F32 v = load(x + i + j * kWidth);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for_lanes(size - i, [&](auto load, auto, int64_t j) {
    F32 v = load(x + i + j);
    sums[0] = fma(v, v, sums[0]);
  });
  return sum_across((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(size);
}

} // namespace mlxinfer::cpu::MLXINFER_ISA
