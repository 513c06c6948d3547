#pragma once

#include <bit>
#include <cstdint>

namespace mlxinfer::cpu {

// Single 16-bit floats, rounded to nearest, ties to even.
inline float bfloat_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bfloat(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>(value == value ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : (bits >> 16) | 0x40u);
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  return std::bit_cast<float>((magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : finite) | sign);
}

inline uint16_t float_to_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) { // a subnormal half: its last place is that of 0.5
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13; // may carry into infinity
  }
  return static_cast<uint16_t>(sign | half);
}

} // namespace mlxinfer::cpu
