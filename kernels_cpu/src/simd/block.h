#pragma once

// The block of sums of a product that stays in registers, for *.kernels.cpp files: some rows times some vectors of columns.

#include "simd/simd.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// A row's factor is read once for all vectors, a vector once for all rows; sums and vectors fill the registers.
#if defined(__AVX512VNNI__)
constexpr int kTallRows = 12, kTallVectors = 2;
#elif defined(__aarch64__)
constexpr int kTallRows = 6, kTallVectors = 4;
#else
constexpr int kTallRows = 6, kTallVectors = 2;
#endif

} // namespace mlxinfer::cpu::MLXINFER_ISA
