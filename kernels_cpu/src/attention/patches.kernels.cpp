// Attention of a tile of queries to all keys of an image, by online softmax (arXiv:1805.02867).

#include "attention/patches.h"
#include "simd/block.h"
#include "simd/floats.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr int kKeys = kTallVectors * kWidth; // of a block
static_assert(kPatchStep % kKeys == 0);

// 2^x for x <= 0 within 2 ulp; 2^-126 below that. The polynomial is that of Cephes' exp2f.
MLXINFER_INLINE F32 power_of_two(F32 x) {
  F32 clamped = x < -126.0f ? broadcast(-126.0f) : x;
  F32 shifted = clamped + 12582912.0f; // 1.5 * 2^23: rounds to an integer in the low bits
  F32 r = clamped - (shifted - 12582912.0f);
  F32 p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  return (F32)((I32)p + ((I32)shifted << 23));
}

template <typename T>
void load_head(const void* from, int64_t dim, int parts, const float* cos, const float* sin, float scale, float* to) {
  auto x = static_cast<const T*>(from);
  if (cos == nullptr) {
    for_lanes(dim, [=](auto load, auto store, int64_t i) { store(to + i, load(x + i) * scale); });
    return;
  }
  const int64_t half = dim / parts / 2;
  for (int part = 0; part < parts; ++part, x += 2 * half, to += 2 * half, cos += 2 * half, sin += 2 * half) {
    for_lanes(half, [=](auto load, auto store, int64_t i) {
      F32 first = load(x + i), second = load(x + half + i);
      store(to + i, (first * load(cos + i) - second * load(sin + i)) * scale);
      store(to + half + i, (second * load(cos + half + i) + first * load(sin + half + i)) * scale);
    });
  }
}

using Sums = F32[kTallRows][kTallVectors];

// Scores of a block of keys, to rows `kPatchStep` apart.
MLXINFER_INLINE void score(const PatchTile& tile, const float* keys, float* scores) {
  Sums sums = {};
  const float* q = tile.queries;
  for (int64_t d = 0; d < tile.dim; ++d, q += kTallRows, keys += kKeys) {
    F32 k[kTallVectors];
    MLXINFER_UNROLL
    for (int j = 0; j < kTallVectors; ++j) {
      k[j] = load(keys + j * kWidth);
    }
    MLXINFER_UNROLL
    for (int m = 0; m < kTallRows; ++m) {
      F32 factor = broadcast(q[m]);
      MLXINFER_UNROLL
      for (int j = 0; j < kTallVectors; ++j) {
        sums[m][j] = fma(k[j], factor, sums[m][j]);
      }
    }
  }
  MLXINFER_UNROLL
  for (int m = 0; m < kTallRows; ++m) {
    MLXINFER_UNROLL
    for (int j = 0; j < kTallVectors; ++j) {
      store(scores + m * kPatchStep + j * kWidth, sums[m][j]);
    }
  }
}

// Scores to 2^(score - max) over `width` columns, a multiple of the lanes. Returns what earlier sums are to be multiplied by.
MLXINFER_INLINE float soften(float* scores, int64_t width, float* max_so_far, float* sum) {
  F32 highest = load(scores);
  for (int64_t t = kWidth; t < width; t += kWidth) {
    highest = max(highest, load(scores + t));
  }
  const float before = *max_so_far, here = max_across(highest), now = here > before ? here : before;
  F32 total = {};
  for (int64_t t = 0; t < width; t += kWidth) {
    F32 p = power_of_two(load(scores + t) - now);
    store(scores + t, p);
    total += p;
  }
  const float shrink = power_of_two(broadcast(before - now))[0];
  *max_so_far = now;
  *sum = *sum * shrink + sum_across(total);
  return shrink;
}

// out = shrink * out + weights times values, for some vectors of columns.
template <int Vectors>
MLXINFER_INLINE void add_values(const float* weights, const float* values, int64_t stride, int64_t count, const float* shrink, float* out) {
  F32 sums[kTallRows][Vectors];
  MLXINFER_UNROLL
  for (int m = 0; m < kTallRows; ++m) {
    MLXINFER_UNROLL
    for (int j = 0; j < Vectors; ++j) {
      sums[m][j] = load(out + m * stride + j * kWidth) * shrink[m];
    }
  }
  for (int64_t t = 0; t < count; ++t, values += stride, ++weights) {
    F32 v[Vectors];
    MLXINFER_UNROLL
    for (int j = 0; j < Vectors; ++j) {
      v[j] = load(values + j * kWidth);
    }
    MLXINFER_UNROLL
    for (int m = 0; m < kTallRows; ++m) {
      F32 factor = broadcast(weights[m * kPatchStep]);
      MLXINFER_UNROLL
      for (int j = 0; j < Vectors; ++j) {
        sums[m][j] = fma(v[j], factor, sums[m][j]);
      }
    }
  }
  MLXINFER_UNROLL
  for (int m = 0; m < kTallRows; ++m) {
    MLXINFER_UNROLL
    for (int j = 0; j < Vectors; ++j) {
      store(out + m * stride + j * kWidth, sums[m][j]);
    }
  }
}

void add(const PatchTile& tile, int64_t first) {
  alignas(64) float scores[kTallRows * kPatchStep];
  float shrink[kTallRows];
  const int64_t left = tile.count - first, count = left < kPatchStep ? left : kPatchStep, width = (count + kKeys - 1) / kKeys * kKeys;
  for (int64_t t = 0; t < width; t += kKeys) {
    score(tile, tile.keys + (first + t) * tile.dim, scores + t);
  }
  for (int m = 0; m < kTallRows; ++m) {
    for (int64_t t = count; t < width; ++t) {
      scores[m * kPatchStep + t] = -__builtin_inff();
    }
    shrink[m] = soften(scores + m * kPatchStep, width, tile.max + m, tile.sum + m);
  }
  const float* values = tile.values + first * tile.width;
  int64_t at = 0;
  for (; at + kTallVectors * kWidth <= tile.width; at += kTallVectors * kWidth) {
    add_values<kTallVectors>(scores, values + at, tile.width, count, shrink, tile.out + at);
  }
  for (; at < tile.width; at += kWidth) {
    add_values<1>(scores, values + at, tile.width, count, shrink, tile.out + at);
  }
}

template <typename T>
void finish(const float* partial, float sum, int64_t dim, void* out) {
  const float factor = 1.0f / sum;
  for_lanes(dim, [=](auto load, auto store, int64_t i) { store(static_cast<T*>(out) + i, load(partial + i) * factor); });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(PatchKernels, patch_kernels) = {
    kTallRows, kKeys, kWidth, {load_head<float>, load_head<Bfloat>, load_head<Half>}, add, {finish<float>, finish<Bfloat>, finish<Half>}};
} // namespace mlxinfer::cpu
