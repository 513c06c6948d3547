#pragma once

// Codes of pages to vectors, for *.kernels.cpp files.

#include "simd/floats.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

#if defined(__AVX512VNNI__) || defined(__AVX2__)
// The lower lanes' codes lie in the first `word` bytes of a vector's, those of the upper ones in the last: two loads that broadcast.
template <int Bits>
struct Places {
  static constexpr int half_lanes = kWidth / 2;
  static constexpr int chunk = kWidth * Bits / 8; // bytes of a vector's codes
  static constexpr int word = chunk < 4 ? 2 : half_lanes * Bits <= 32 ? 4 : 8;
  alignas(64) int32_t shifts[kWidth];
  alignas(64) uint8_t bytes[4 * kWidth]; // that a lane takes from words of 8
  constexpr Places() : shifts{}, bytes{} {
    for (int lane = 0; lane < kWidth; ++lane) {
      const int bit = lane < half_lanes ? lane * Bits : lane * Bits - 8 * (chunk - word);
      shifts[lane] = word == 8 ? bit % 8 : bit;
      for (int i = 0; i < 4; ++i) {
        bytes[4 * lane + i] = static_cast<uint8_t>(i < 2 && bit / 8 + i < 8 ? bit / 8 + i : 0x80);
      }
    }
  }
};
template <int Bits>
constexpr Places<Bits> kPlaces{};
#else
// `Bytes` (at most 4) bytes, the first one lowest.
template <int Bytes>
MLXINFER_INLINE uint32_t load_word(const uint8_t* p) {
  constexpr int first = Bytes >= 4 ? 4 : Bytes >= 2 ? 2 : Bytes;
  uint32_t word = 0;
  memcpy(&word, p, first);
  if constexpr (Bytes > first) {
    word |= load_word<Bytes - first>(p + first) << (8 * first);
  }
  return word;
}
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
    using P = Places<Bits>;
    __m512i words;
    if constexpr (P::word == 8) {
      words = _mm512_set1_epi64(load_bits<int64_t>(p));
      words = _mm512_mask_set1_epi64(words, 0xf0, load_bits<int64_t>(p + P::chunk - 8));
      words = _mm512_shuffle_epi8(words, _mm512_load_si512(kPlaces<Bits>.bytes));
    } else {
      words = _mm512_set1_epi32(load_bits<int32_t>(p));
      if constexpr (P::chunk > 4) {
        words = _mm512_mask_set1_epi32(words, 0xff00, load_bits<int32_t>(p + P::chunk - 4));
      }
    }
    return to_float((I32)((U32)_mm512_srlv_epi32(words, _mm512_load_si512(kPlaces<Bits>.shifts)) & mask));
  }
#elif defined(__AVX2__)
  p += j * Bits;
  if constexpr (Bits == 8) {
    return to_float((I32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  } else {
    using P = Places<Bits>;
    __m256i words;
    if constexpr (Bits == 2) {
      words = _mm256_set1_epi16(load_bits<int16_t>(p));
    } else if constexpr (Bits == 3) {
      words = _mm256_blend_epi32(_mm256_set1_epi16(load_bits<int16_t>(p)), _mm256_set1_epi16(load_bits<int16_t>(p + 1)), 0xf0);
    } else {
      words = _mm256_set1_epi32(load_bits<int32_t>(p));
      if constexpr (P::chunk > 4) {
        words = _mm256_blend_epi32(words, _mm256_set1_epi32(load_bits<int32_t>(p + P::chunk - 4)), 0xf0);
      }
    }
    const __m256i shifts = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces<Bits>.shifts));
    return to_float((I32)((U32)_mm256_srlv_epi32(words, shifts) & mask));
  }
#else
  const int bit = j * 4 * Bits; // half a byte where both are odd
  const uint32_t word = load_word<(4 * Bits + 7) / 8>(p + bit / 8) >> (bit % 8);
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
