#include "norm/rms_norm.h"

#include "simd/floats.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <typename T>
float mean_square(const T* x, int64_t size) {
  F32 sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    MLXINFER_UNROLL
    for (int j = 0; j < 4; ++j) {
      F32 v = load(x + i + j * kWidth);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for_lanes(size - i, [&](auto load, auto, int64_t j) {
    F32 v = load(x + i + j);
    sums[0] = fma(v, v, sums[0]);
  });
  return sum_across((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(size);
}

template <typename T>
void row(const void* from, const void* weight, float eps, const void* onto, void* to, int64_t size) {
  auto x = static_cast<const T*>(from), w = static_cast<const T*>(weight), base = static_cast<const T*>(onto);
  auto y = static_cast<T*>(to);
  const float factor = 1.0f / __builtin_sqrtf(mean_square(x, size) + eps);
  for_lanes(size, [=](auto load, auto store, int64_t i) {
    F32 v = load(x + i) * factor;
    v = w == nullptr ? v : v * load(w + i);
    store(y + i, base == nullptr ? v : v + load(base + i));
  });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(RmsNormKernels, rms_norm_kernels) = {
    {MLXINFER_ISA::row<float>, MLXINFER_ISA::row<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::row<MLXINFER_ISA::Half>}};
}
