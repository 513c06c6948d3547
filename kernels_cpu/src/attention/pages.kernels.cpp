// Pages to tiles of float32.

#include "attention/codes.h"
#include "attention/tile.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <typename T>
void turn(const void* page, int64_t tokens, int64_t dim, float* to) {
  auto rows = static_cast<const T*>(page);
  int64_t whole = dim / kWidth * kWidth, left = dim - whole;
  for (int64_t t = 0; t < tokens; t += kWidth) {
    const T* row[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      row[i] = rows + (t + i < tokens ? t + i : 0) * dim;
    }
    F32 block[kWidth];
    for (int64_t d = 0; d < whole; d += kWidth) {
      MLXINFER_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        block[i] = load(row[i] + d);
      }
      transpose(block);
      MLXINFER_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        store(to + (d + i) * kPageTokens + t, block[i]);
      }
    }
    if (left > 0) {
      for (int i = 0; i < kWidth; ++i) {
        block[i] = load_first(row[i] + whole, left);
      }
      transpose(block);
      for (int64_t i = 0; i < left; ++i) {
        store(to + (whole + i) * kPageTokens + t, block[i]);
      }
    }
  }
}

// The last `count` values of a row, fewer than a vector's.
template <typename Numbers>
MLXINFER_INLINE F32 load_rest(const uint8_t* p, int64_t count) {
  uint8_t buffer[4 * kWidth] = {};
  memcpy(buffer, p, static_cast<size_t>(Numbers::bytes(count)));
  return Numbers::load(buffer, 0);
}

template <typename Numbers>
void unpack(const PageRows& from, int64_t rows, int64_t size, int64_t width, float* to) {
  auto p = static_cast<const uint8_t*>(from.data);
  const int64_t whole = size / kWidth * kWidth;
  for (int64_t row = 0; row < rows; ++row, p += from.stride, to += width) {
    for (int64_t i = 0; i < whole; i += kWidth) {
      store(to + i, Numbers::load(p, static_cast<int>(i / kWidth)));
    }
    if (whole < size) {
      store(to + whole, load_rest<Numbers>(p + Numbers::bytes(whole), size - whole));
    }
  }
}

void scales(const void* from, int64_t rows, int64_t groups, float* room, float* to) {
  auto halves = static_cast<const Half*>(from);
  for (int which = 0; which < 2; ++which, halves += rows * groups, to += rows) {
    float* floats = groups == 1 ? to : room;
    for_lanes(rows * groups, [=](auto load, auto store, int64_t i) { store(floats + i, load(halves + i)); });
    for (int64_t group = 0; group < groups && groups > 1; ++group) {
      for (int64_t row = 0; row < rows; ++row) {
        to[group * 2 * rows + row] = floats[row * groups + group];
      }
    }
  }
}

void dequantize(const void* scales, const PageForm& form, int64_t width, float* tile) {
  auto scale = static_cast<const Half*>(scales), bias = scale + form.rows * form.groups();
  for (int64_t row = 0; row < form.rows; ++row, tile += width) {
    for (int64_t at = 0; at < form.size; at += form.group, ++scale, ++bias) {
      const float factor = load_first(scale, 1)[0], summand = load_first(bias, 1)[0];
      float* values = tile + at;
      for_lanes(form.group, [=](auto load, auto store, int64_t i) { store(values + i, fma(load(values + i), broadcast(factor), broadcast(summand))); });
    }
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(PageKernels, page_kernels) = {
    {turn<float>, turn<Bfloat>, turn<Half>},
    {unpack<Plain<float>>, unpack<Plain<Bfloat>>, unpack<Plain<Half>>, unpack<Codes<2>>, unpack<Codes<3>>, unpack<Codes<4>>,
     unpack<Codes<5>>, unpack<Codes<6>>, unpack<Codes<8>>},
    scales,
    dequantize};
} // namespace mlxinfer::cpu
