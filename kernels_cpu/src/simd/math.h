#pragma once

#include "simd/simd.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// e^x within 2 ulp; 0 below -87.3, infinity above 88.7, NaN for NaN. Cody-Waite reduction, then the polynomial of Cephes' expf.
MLXINFER_INLINE F32 exp(F32 x) {
  F32 clamped = min(max(x, broadcast(-87.33654f)), broadcast(88.72283f));
  F32 shifted = clamped * 1.44269504f + 12582912.0f; // 1.5 * 2^23: rounds to an integer in the low bits
  F32 n = shifted - 12582912.0f;
  F32 r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  F32 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // Two factors, as n may be 128.
  I32 exponent = (I32)shifted - 0x4b400000, half = exponent >> 1;
  F32 result = p * (F32)((half + 127) << 23) * (F32)((exponent - half + 127) << 23);
  result = x > 88.72283f ? broadcast(__builtin_inff()) : result;
  result = x < -87.33654f ? F32{} : result;
  return x == x ? result : x;
}

MLXINFER_INLINE F32 sigmoid(F32 x) {
  return 1.0f / (1.0f + exp(-x));
}

} // namespace mlxinfer::cpu::MLXINFER_ISA
