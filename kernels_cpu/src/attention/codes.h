#pragma once

// Codes of pages to vectors, for *.kernels.cpp files.

#include "simd/floats.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// `Bytes` (at most 8) bytes, the first one lowest.
template <int Bytes>
MLXINFER_INLINE uint64_t load_word(const uint8_t* p) {
  constexpr int first = Bytes >= 8 ? 8 : Bytes >= 4 ? 4 : Bytes >= 2 ? 2 : Bytes;
  uint64_t word = 0;
  memcpy(&word, p, first);
  if constexpr (Bytes > first) {
    word |= load_word<Bytes - first>(p + first) << (8 * first);
  }
  return word;
}

#if defined(__AVX512VNNI__)
// Which bytes each lane needs, and how far its code lies in them.
template <int Bits>
struct Picks {
  alignas(64) uint8_t bytes[64];
  alignas(64) int32_t shifts[16];
  constexpr Picks() : bytes{}, shifts{} {
    for (int lane = 0; lane < 16; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int byte = lane * Bits / 8 + i;
        bytes[lane * 4 + i] = static_cast<uint8_t>(i < 2 && byte < 2 * Bits ? byte : 0x80);
      }
      shifts[lane] = lane * Bits % 8;
    }
  }
};
template <int Bits>
constexpr Picks<Bits> kPicks{};
#endif

// Values j * kWidth and up of those that begin at p. Reads no byte beyond them.
template <int Bits>
MLXINFER_INLINE F32 load_codes(const uint8_t* p, int j) {
  constexpr uint32_t mask = (1u << Bits) - 1;
#if defined(__AVX512VNNI__)
  p += j * 2 * Bits;
  if constexpr (Bits == 8) {
    return to_float((I32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  } else {
    __m512i chunk;
    if constexpr (Bits <= 4) {
      chunk = _mm512_set1_epi64(static_cast<int64_t>(load_word<2 * Bits>(p)));
    } else {
      const auto low = static_cast<int64_t>(load_word<8>(p)), high = static_cast<int64_t>(load_word<2 * Bits - 8>(p + 8));
      chunk = _mm512_broadcast_i32x4(_mm_set_epi64x(high, low));
    }
    const __m512i bytes = _mm512_shuffle_epi8(chunk, _mm512_load_si512(kPicks<Bits>.bytes));
    return to_float((I32)(((U32)_mm512_srlv_epi32(bytes, _mm512_load_si512(kPicks<Bits>.shifts))) & mask));
  }
#elif defined(__AVX2__)
  p += j * Bits;
  if constexpr (Bits == 8) {
    return to_float((I32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  } else {
    const uint64_t word = load_word<Bits>(p);
    if constexpr (Bits <= 4) {
      const I32 shifts = {0, Bits, 2 * Bits, 3 * Bits, 4 * Bits, 5 * Bits, 6 * Bits, 7 * Bits};
      return to_float((I32)((broadcast(static_cast<uint32_t>(word)) >> (U32)shifts) & mask));
    } else {
      const I32 shifts = {0, Bits, 2 * Bits, 3 * Bits, 0, Bits, 2 * Bits, 3 * Bits};
      const __m128i low = _mm_set1_epi32(static_cast<int32_t>(word)), high = _mm_set1_epi32(static_cast<int32_t>(word >> (4 * Bits)));
      return to_float((I32)(((U32)_mm256_set_m128i(high, low) >> (U32)shifts) & mask));
    }
  }
#else
  const int bit = j * 4 * Bits; // half a byte where both are odd
  const auto word = static_cast<uint32_t>(load_word<(4 * Bits + 7) / 8>(p + bit / 8)) >> (bit % 8);
  const U32 shifts = {0, Bits, 2 * Bits, 3 * Bits};
  return to_float((I32)((broadcast(word) >> shifts) & mask));
#endif
}

// Rows of numbers of one form: `load(p, j)` gives values j * kWidth and up of those at p.
template <typename T>
struct Plain {
  MLXINFER_INLINE static F32 load(const uint8_t* p, int j) {
    return MLXINFER_ISA::load(reinterpret_cast<const T*>(p) + j * kWidth);
  }
  static constexpr int64_t bytes(int64_t values) {
    return values * static_cast<int64_t>(sizeof(T));
  }
};
template <int Bits>
struct Codes {
  MLXINFER_INLINE static F32 load(const uint8_t* p, int j) {
    return load_codes<Bits>(p, j);
  }
  static constexpr int64_t bytes(int64_t values) {
    return values * Bits / 8;
  }
};

} // namespace mlxinfer::cpu::MLXINFER_ISA
