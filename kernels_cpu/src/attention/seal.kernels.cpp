// Rows of numbers to codes and scales.

#include "attention/tile.h"
#include "simd/floats.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr float kMostHalf = 65504;

MLXINFER_INLINE float clamped(float x, float low, float high) {
  x = x > low ? x : low; // also where x is NaN
  return x < high ? x : high;
}

MLXINFER_INLINE uint16_t half_of(float x) {
  return to_half(broadcast(x))[0];
}
MLXINFER_INLINE float float_of(uint16_t half) {
  Half h{half};
  return load_first(&h, 1)[0];
}

// The highest float16 that is not above x.
MLXINFER_INLINE uint16_t half_below(float x) {
  const uint16_t half = half_of(x);
  if (float_of(half) <= x) {
    return half;
  }
  return static_cast<uint16_t>(half == 0 ? 0x8001 : (half & 0x8000) != 0 ? half + 1 : half - 1);
}

// The lowest float16 that is not below x, which is positive.
MLXINFER_INLINE uint16_t half_above(float x) {
  const uint16_t half = half_of(x);
  return static_cast<uint16_t>(float_of(half) >= x ? half : half + 1);
}

struct Scale {
  uint16_t scale, bias;
};

template <typename T>
MLXINFER_INLINE Scale scale_of(const T* group, int64_t size, float levels, float inset) {
  const F32 first = broadcast(load_first(group, 1)[0]);
  F32 low = first, high = first;
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    F32 v = load(group + i);
    low = min(v, low);
    high = max(v, high);
  }
  if (i < size) {
    T rest[kWidth];
    for (int64_t j = 0; j < kWidth; ++j) {
      rest[j] = group[i + j < size ? i + j : i];
    }
    low = min(load(rest), low);
    high = max(load(rest), high);
  }
  const float least = clamped(across<kWidth / 2>(low, [](F32 a, F32 b) { return min(a, b); }), -kMostHalf, kMostHalf);
  const float most = clamped(max_across(high), -kMostHalf, kMostHalf);
  const float margin = (most - least) * inset;
  const uint16_t bias = half_below(least + margin + 0.0f); // never -0
  const float step = (most - margin - float_of(bias)) / levels;
  return {half_above(clamped(step, 0x1p-24f, kMostHalf)), bias};
}

template <typename T>
MLXINFER_INLINE void codes_of(const T* group, int64_t size, Scale s, float levels, uint8_t* codes) {
  const F32 scale = broadcast(float_of(s.scale)), bias = broadcast(float_of(s.bias));
  for_lanes(size, [=](auto load, auto, int64_t i) {
    F32 code = (load(group + i) - bias) / scale;
    code = min(max(code, F32{}), broadcast(levels));
    I32 integer = (I32)(code + 12582912.0f); // 1.5 * 2^23: rounds half to even
    for (int lane = 0; lane < kWidth && i + lane < size; ++lane) {
      codes[i + lane] = static_cast<uint8_t>(integer[lane]);
    }
  });
}

// Eight codes, one in each byte, moved together.
MLXINFER_INLINE uint64_t together(uint64_t eight, int bits) {
#if defined(__BMI2__)
  return _pext_u64(eight, 0x0101010101010101ull * ((1u << bits) - 1));
#else
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    word |= ((eight >> (8 * i)) & 0xff) << (bits * i);
  }
  return word;
#endif
}

template <typename T>
void seal(const void* from, const PageForm& form, void* codes, void* scales) {
  const int bits = kFormBits[form.form];
  const float levels = static_cast<float>((1 << bits) - 1);
  const float inset = form.inset ? 0.25f / static_cast<float>(1 << bits) : 0.0f;
  auto values = static_cast<const T*>(from);
  auto to = static_cast<uint8_t*>(codes);
  auto scale = static_cast<uint16_t*>(scales), bias = scale + form.rows * form.groups();
  alignas(64) uint8_t group[64];
  for (int64_t row = 0; row < form.rows; ++row, to += form.row_bytes()) {
    memset(to + form.row_bytes() - 4, 0, 4);
    uint8_t* end = to;
    for (int64_t at = 0; at < form.size; at += form.group, values += form.group) {
      const Scale s = scale_of(values, form.group, levels, inset);
      *scale++ = s.scale;
      *bias++ = s.bias;
      codes_of(values, form.group, s, levels, group);
      for (int64_t i = 0; i < form.group; i += 8, end += bits) {
        uint64_t eight;
        memcpy(&eight, group + i, 8);
        eight = together(eight, bits);
        memcpy(end, &eight, static_cast<size_t>(bits));
      }
    }
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(SealKernels, seal_kernels) = {{seal<float>, seal<Bfloat>, seal<Half>}};
} // namespace mlxinfer::cpu
