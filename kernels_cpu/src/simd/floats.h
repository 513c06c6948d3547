#pragma once

// Loads and stores of float32, bfloat16 and float16 as vectors of float32; stores round to nearest, ties to even.

#include "simd/simd.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

MLXINFER_INLINE U32 widen(U16 v) {
  return __builtin_convertvector(v, U32);
}
MLXINFER_INLINE U16 narrow(U32 v) {
  return __builtin_convertvector(v, U16);
}

MLXINFER_INLINE F32 from_bfloat(U16 v) {
  return (F32)(widen(v) << 16);
}

MLXINFER_INLINE U16 to_bfloat(F32 v) {
  U32 bits = (U32)v;
  U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U32 quiet_nan = (bits >> 16) | 0x40u;
  return narrow((U32)(v == v ? rounded : quiet_nan));
}

MLXINFER_INLINE F32 from_half(U16 v) {
#if defined(__AVX512VNNI__)
  return (F32)_mm512_cvtph_ps((__m256i)v);
#elif defined(__AVX2__)
  return (F32)_mm256_cvtph_ps((__m128i)v);
#elif defined(__aarch64__)
  return (F32)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)v));
#else
  U32 h = widen(v), sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  U32 finite = (U32)((F32)(magnitude << 13) * 0x1p112f);
  U32 special = (magnitude << 13) | 0x7f800000u;
  return (F32)((magnitude >= 0x7c00u ? special : finite) | sign);
#endif
}

MLXINFER_INLINE U16 to_half(F32 v) {
#if defined(__AVX512VNNI__)
  return (U16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (U16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (U16)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v));
#else
  U32 bits = (U32)v, sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  U32 subnormal = (U32)((F32)magnitude + 0.5f) - 0x3f000000u; // its last place is that of 0.5
  U32 half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  half = magnitude < 0x38800000u ? subnormal : half;
  half = magnitude >= 0x47800000u ? broadcast(0x7c00u) : half;
  half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x1ffu) : half;
  return narrow(half | sign);
#endif
}

MLXINFER_INLINE F32 load(const float* p) {
  return load_bits<F32>(p);
}
MLXINFER_INLINE F32 load(const Bfloat* p) {
  return from_bfloat(load_bits<U16>(p));
}
MLXINFER_INLINE F32 load(const Half* p) {
  return from_half(load_bits<U16>(p));
}
MLXINFER_INLINE void store(float* p, F32 v) {
  store_bits(p, v);
}
MLXINFER_INLINE void store(Bfloat* p, F32 v) {
  store_bits(p, to_bfloat(v));
}
MLXINFER_INLINE void store(Half* p, F32 v) {
  store_bits(p, to_half(v));
}

// The first `count` < kWidth lanes; the others are zero.
template <typename T>
MLXINFER_INLINE F32 load_first(const T* p, int64_t count) {
  T buffer[kWidth] = {};
  memcpy(buffer, p, sizeof(T) * static_cast<size_t>(count));
  return load(buffer);
}
template <typename T>
MLXINFER_INLINE void store_first(T* p, F32 v, int64_t count) {
  T buffer[kWidth];
  store(buffer, v);
  memcpy(p, buffer, sizeof(T) * static_cast<size_t>(count));
}

// Calls `body(load, store, i)` for i = 0, kWidth, ... below `size`, where `load(p)` and `store(p, v)` touch the lanes that are there.
template <typename Body>
MLXINFER_INLINE void for_lanes(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    body([](auto* p) { return load(p); }, [](auto* p, F32 v) { store(p, v); }, i);
  }
  if (int64_t left = size - i; left > 0) {
    body([left](auto* p) { return load_first(p, left); }, [left](auto* p, F32 v) { store_first(p, v, left); }, i);
  }
}

} // namespace mlxinfer::cpu::MLXINFER_ISA
