// Pages to tiles of float32.

#include "attention/tile.h"
#include "simd/floats.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

MLXINFER_INLINE void prefetch(const void* data, int64_t bytes, int64_t part) {
  auto p = static_cast<const char*>(data);
  constexpr int64_t parts = kPageTokens / kWidth;
  for (int64_t i = part * bytes / parts; i < (part + 1) * bytes / parts; i += 64) {
    __builtin_prefetch(p + i, 0, 0);
  }
}

template <typename T>
void keys(const void* page, int64_t tokens, int64_t dim, float* tile, Soon soon) {
  auto rows = static_cast<const T*>(page);
  int64_t whole = dim / kWidth * kWidth, left = dim - whole;
  for (int64_t t = 0; t < kPageTokens; t += kWidth) {
    prefetch(soon.values, soon.value_bytes, t / kWidth);
    prefetch(soon.keys, soon.key_bytes, t / kWidth);
    const T* row[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      row[i] = rows + (t + i < tokens ? t + i : 0) * dim;
    }
    if (t >= tokens) {
      for (int64_t d = 0; d < dim; ++d) {
        store(tile + d * kPageTokens + t, F32{});
      }
      continue;
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
        store(tile + (d + i) * kPageTokens + t, block[i]);
      }
    }
    if (left > 0) {
      for (int i = 0; i < kWidth; ++i) {
        block[i] = load_first(row[i] + whole, left);
      }
      transpose(block);
      for (int64_t i = 0; i < left; ++i) {
        store(tile + (whole + i) * kPageTokens + t, block[i]);
      }
    }
  }
}

template <typename T>
void values(const void* page, int64_t tokens, int64_t dim, int64_t width, float* tile) {
  auto rows = static_cast<const T*>(page);
  for (int64_t t = 0; t < kPageTokens; ++t, tile += width) {
    if (t >= tokens) {
      memset(tile, 0, sizeof(float) * static_cast<size_t>(width));
      continue;
    }
    for_lanes(dim, [=](auto load, auto, int64_t i) { store(tile + i, load(rows + t * dim + i)); });
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(PageKernels, page_kernels) = {
    {keys<float>, keys<Bfloat>, keys<Half>},
    {values<float>, values<Bfloat>, values<Half>}};
} // namespace mlxinfer::cpu
