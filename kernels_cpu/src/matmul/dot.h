#pragma once

// Dot products of a block's codes with activations of 8 bits, for *.kernels.cpp files.

#include "matmul/unpack.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

// How a format's codes enter integer products on this machine: as unsigned bytes up to `kMax`, or as signed ones; the true
// values are those plus `kOffset`.
template <Code C>
struct Integers {
  static constexpr int kBits = code_bits(C);
  static constexpr bool kIsFp4 = C == Code::mxfp4 || C == Code::nvfp4;
#if defined(__aarch64__)
  static constexpr bool kSigned = true;
  static constexpr int kOffset = kBits == 8 ? 128 : 0;
  static constexpr int kFp4Offset = 0;
#else
  static constexpr bool kSigned = kBits == 8 && kWidth == 8; // AVX2 adds pairs of products in 16 bits
  static constexpr int kOffset = kIsFp4 ? -12 : kSigned ? 128 : 0;
  static constexpr int kFp4Offset = 12;
#endif
  static constexpr int kMax = kIsFp4 ? 24 : (1 << kBits) - 1;

  MLXINFER_INLINE static Codes unpack(const uint8_t* block, int sub) {
    Codes codes = unpack_codes<kBits>(block, sub);
    MLXINFER_UNROLL
    for (int i = 0; i < 8; ++i) {
      if constexpr (kIsFp4) {
        codes.v[i] = fp4_doubled<kFp4Offset>(codes.v[i]);
      } else if constexpr (kSigned && kBits == 8) {
        codes.v[i] ^= 0x80808080u;
      }
    }
    return codes;
  }
};

// Rows of the largest tile.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int kMostTileRows = kLargestTile;
#else
constexpr int kMostTileRows = kLargestTile / 2;
#endif

// acc + the sum over vectors [From, From + Count) of codes times x[i * stride], four columns each.
template <typename Form, int From, int Count>
MLXINFER_INLINE I32 dot(I32 acc, const Codes& codes, const int32_t* x, int stride) {
#if defined(__AVX512VNNI__)
  MLXINFER_UNROLL
  for (int i = From; i < From + Count; ++i) {
    acc = (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes.v[i], _mm512_set1_epi32(x[i * stride]));
  }
  return acc;
#elif defined(__AVX2__)
  // Products of this many vectors fit into 16 bits together.
  constexpr int most = Form::kSigned ? 1 : 32767 / (2 * 127 * Form::kMax);
  constexpr int together = most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
  constexpr int step = together < Count ? together : Count;
  const __m256i ones = _mm256_set1_epi16(1);
  MLXINFER_UNROLL
  for (int i = From; i < From + Count; i += step) {
    __m256i pairs = _mm256_setzero_si256();
    MLXINFER_UNROLL
    for (int j = i; j < i + step; ++j) {
      __m256i w = (__m256i)codes.v[j], a = _mm256_set1_epi32(x[j * stride]);
      __m256i products = Form::kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w)) : _mm256_maddubs_epi16(w, a);
      pairs = j == i ? products : _mm256_add_epi16(pairs, products);
    }
    acc += (I32)_mm256_madd_epi16(pairs, ones);
  }
  return acc;
#elif defined(__ARM_FEATURE_DOTPROD)
  MLXINFER_UNROLL
  for (int i = From; i < From + Count; ++i) {
    acc = (I32)vdotq_s32((int32x4_t)acc, (int8x16_t)codes.v[i], vreinterpretq_s8_s32(vdupq_n_s32(x[i * stride])));
  }
  return acc;
#elif defined(__aarch64__)
  MLXINFER_UNROLL
  for (int i = From; i < From + Count; ++i) {
    int8x16_t w = (int8x16_t)codes.v[i], a = vreinterpretq_s8_s32(vdupq_n_s32(x[i * stride]));
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
    acc += (I32)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
  }
  return acc;
#else
  MLXINFER_UNROLL
  for (int i = From; i < From + Count; ++i) {
    int8_t four[4];
    memcpy(four, x + i * stride, 4);
#if defined(__x86_64__)
    int32_t even = (four[0] & 0xffff) | four[2] << 16, odd = (four[1] & 0xffff) | four[3] << 16;
    __m128i w = (__m128i)codes.v[i], low = _mm_set1_epi16(0xff);
    acc += (I32)_mm_madd_epi16(_mm_and_si128(w, low), _mm_set1_epi32(even));
    acc += (I32)_mm_madd_epi16(_mm_srli_epi16(w, 8), _mm_set1_epi32(odd));
#else
    for (int j = 0; j < 4; ++j) {
      acc += (I32)((codes.v[i] >> (8 * j)) & 0xffu) * four[j];
    }
#endif
  }
  return acc;
#endif
}

} // namespace mlxinfer::cpu::MLXINFER_ISA
