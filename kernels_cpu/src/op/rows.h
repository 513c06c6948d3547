#pragma once

#include <cstdint>

namespace mlxinfer::cpu {

// A matrix `[count, size]` in memory, rows `stride` elements apart; the stride may be 0 or negative.
struct Rows {
  const void* data;
  int64_t count, size, stride;

  template <typename T>
  const T* row(int64_t i) const {
    return static_cast<const T*>(data) + i * stride;
  }
};

// Order of the dtypes in tables of kernels.
enum class Float { f32, bf16, f16 };
constexpr int kFloats = 3;

constexpr int64_t item_bytes(Float dtype) {
  return dtype == Float::f32 ? 4 : 2;
}

} // namespace mlxinfer::cpu
