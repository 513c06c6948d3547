#pragma once

// Blocks of packed codes to vectors, for *.kernels.cpp files.

#include "matmul/tile.h"
#include "simd/floats.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// Vectors that make up the 16 rows of a panel.
constexpr int kSubs = kPanelRows / kWidth;

// 8 vectors: lane = row, byte = column.
struct Codes {
  U32 v[8];
};

MLXINFER_INLINE U32 plane_vector(const uint8_t* block, int index, int sub) {
  return load_bits<U32>(block + (index * kSubs + sub) * static_cast<int>(sizeof(U32)));
}

// Codes of 1 to 6 or 8 bits from their planes: the highest plane first in memory holds the low bits.
template <int Bits>
MLXINFER_INLINE Codes unpack_codes(const uint8_t* block, int sub) {
  Codes codes;
  if constexpr (Bits == 8) {
    for (int i = 0; i < 8; ++i) {
      codes.v[i] = plane_vector(block, i, sub);
    }
    return codes;
  }
  if constexpr ((Bits & 4) != 0) {
    for (int i = 0; i < 4; ++i) {
      U32 plane = plane_vector(block, i, sub);
      codes.v[2 * i] = plane & 0x0f0f0f0fu;
      codes.v[2 * i + 1] = (plane >> 4) & 0x0f0f0f0fu;
    }
  }
  if constexpr ((Bits & 2) != 0) {
    for (int i = 0; i < 2; ++i) {
      U32 plane = plane_vector(block, (Bits & 4) + i, sub);
      for (int j = 0; j < 4; ++j) {
        if constexpr ((Bits & 4) != 0) {
          U32 high = j < 2 ? plane << (4 - 2 * j) : plane >> (2 * j - 4);
          codes.v[4 * i + j] |= high & 0x30303030u;
        } else {
          codes.v[4 * i + j] = (plane >> (2 * j)) & 0x03030303u;
        }
      }
    }
  }
  if constexpr ((Bits & 1) != 0) {
    constexpr int below = Bits & 6;
    U32 plane = plane_vector(block, below, sub);
    for (int j = 0; j < 8; ++j) {
      U32 high = j <= below ? plane << (below - j) : plane >> (j - below);
      high &= 0x01010101u << below;
      codes.v[j] = below != 0 ? codes.v[j] | high : high;
    }
  }
  return codes;
}

// Twice the value of the E2M1 floats 0 to 15: 0 1 2 3 4 6 8 12, and the same negative; `offset` is added.
template <int Offset>
MLXINFER_INLINE U32 fp4_doubled(U32 codes) {
  constexpr int8_t table[16] = {Offset + 0, Offset + 1, Offset + 2, Offset + 3, Offset + 4, Offset + 6, Offset + 8, Offset + 12,
                                Offset - 0, Offset - 1, Offset - 2, Offset - 3, Offset - 4, Offset - 6, Offset - 8, Offset - 12};
#if defined(__AVX512VNNI__)
  const __m512i lut = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (U32)_mm512_shuffle_epi8(lut, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i lut = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (U32)_mm256_shuffle_epi8(lut, (__m256i)codes);
#elif defined(__aarch64__)
  return (U32)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes);
#else
  U32 values;
  for (int lane = 0; lane < kWidth; ++lane) {
    uint32_t four = 0;
    for (int byte = 0; byte < 32; byte += 8) {
      four |= static_cast<uint32_t>(static_cast<uint8_t>(table[(codes[lane] >> byte) & 15])) << byte;
    }
    values[lane] = four;
  }
  return values;
#endif
}

// The E4M3 floats in the low bytes, the rest of each lane being zero.
MLXINFER_INLINE F32 from_e4m3(U32 codes) {
  U32 magnitude = codes & 0x7fu;
  F32 value = (F32)(magnitude << 20) * 0x1p120f;
  value = magnitude == 0x7fu ? broadcast(__builtin_nanf("")) : value;
  return (F32)((U32)value | ((codes & 0x80u) << 24));
}

MLXINFER_INLINE F32 from_e8m0(U32 codes) {
  U32 bits = codes << 23;
  return (F32)(codes == 0u ? broadcast(uint32_t{0x400000}) : bits);
}

typedef uint8_t U8Lanes __attribute__((vector_size(MLXINFER_WIDTH)));
typedef int8_t I8Lanes __attribute__((vector_size(MLXINFER_WIDTH)));

// A byte per lane. Spelt out, as GCC widens them one by one.
MLXINFER_INLINE I32 load_signed_bytes(const uint8_t* p) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_bits<I8Lanes>(p), I32);
#endif
}
MLXINFER_INLINE U32 load_bytes(const uint8_t* p) {
#if defined(__AVX512VNNI__)
  return (U32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_bits<U8Lanes>(p), U32);
#endif
}

MLXINFER_INLINE F32 load_scale(const uint8_t* scales, Scale scale, int sub) {
  switch (scale) {
    case Scale::f16:
      return load(reinterpret_cast<const Half*>(scales) + sub * kWidth);
    case Scale::f32:
      return load(reinterpret_cast<const float*>(scales) + sub * kWidth);
    case Scale::bf16:
      return load(reinterpret_cast<const Bfloat*>(scales) + sub * kWidth);
    case Scale::e8m0:
      return from_e8m0(load_bytes(scales + sub * kWidth));
    default:
      return from_e4m3(load_bytes(scales + sub * kWidth));
  }
}

// What the codes of a group, or of each half of a block, are multiplied with, and what is added for each column.
struct BlockScales {
  F32 scale[2], bias[2];
};

// Goes through the headers of a panel, for `kWidth` of its rows, or for several parts of so many from part `sub` on.
template <Code C, int Parts = 1>
class Headers {
 public:
  MLXINFER_INLINE Headers(const Panel& panel, int sub) : panel_(panel), sub_(sub), at_(panel.headers) {}

  MLXINFER_INLINE const uint8_t* at() const {
    return at_;
  }

  // The scales of the next `blocks_per_group` blocks.
  MLXINFER_INLINE BlockScales next() {
    static_assert(Parts == 1);
    BlockScales s[1];
    next(s);
    return s[0];
  }

  // The same for each part.
  MLXINFER_INLINE void next(BlockScales (&s)[Parts]) {
    if constexpr (!is_plain(C)) {
      if (is_affine(C) && panel_.scale == Scale::nested) {
        enter_nest();
      }
      MLXINFER_UNROLL
      for (int half = 0; half < (has_halves(C) ? 2 : 1); ++half) {
        take(s, &BlockScales::scale, half, scale_);
        if constexpr (is_affine(C)) {
          if (panel_.has_biases) {
            take(s, &BlockScales::bias, half, bias_);
          } else {
            MLXINFER_UNROLL
            for (int part = 0; part < Parts; ++part) {
              s[part].bias[half] = s[part].scale[half] * -panel_.zero;
            }
          }
        }
      }
    }
  }

 private:
  // The next scale or bias of each part, in multiples of `units` where it is nested.
  MLXINFER_INLINE void take(BlockScales (&s)[Parts], F32 (BlockScales::*to)[2], int half, const F32 (&units)[Parts]) {
    const uint8_t* from = at_;
    at_ += panel_.scale_bytes * kPanelRows;
    MLXINFER_UNROLL
    for (int part = 0; part < Parts; ++part) {
      const int sub = sub_ + part;
      (s[part].*to)[half] = is_affine(C) && panel_.scale == Scale::nested ? to_float(load_signed_bytes(from + sub * kWidth)) * units[part]
                                                                           : load_scale(from, panel_.scale, sub);
    }
  }

  MLXINFER_INLINE void enter_nest() {
    if (left_ == 0) {
      enter_nest(scale_);
      if (panel_.has_biases) {
        enter_nest(bias_);
      }
      left_ = kNestColumns / kBlockColumns;
    }
    --left_;
  }

  MLXINFER_INLINE void enter_nest(F32 (&units)[Parts]) {
    MLXINFER_UNROLL
    for (int part = 0; part < Parts; ++part) {
      units[part] = load_scale(at_, Scale::f16, sub_ + part);
    }
    at_ += 2 * kPanelRows;
  }

  const Panel& panel_;
  const int sub_;
  const uint8_t* at_;
  int left_ = 0; // blocks of these 256 columns
  F32 scale_[Parts] = {}, bias_[Parts] = {};
};

} // namespace mlxinfer::cpu::MLXINFER_ISA
