#include "norm/rms_norm.h"

#include "norm/mean_square.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <typename T>
MLXINFER_INLINE void finish(const T* x, float mean, float factor, const T* w, const T* base, T* y, int64_t size) {
  for_lanes(size, [=](auto load, auto store, int64_t i) {
    F32 v = (load(x + i) - mean) * factor;
    v = w == nullptr ? v : v * load(w + i);
    store(y + i, base == nullptr ? v : v + load(base + i));
  });
}

template <typename T>
void row(const void* from, const void* weight, float eps, const void* onto, void* to, int64_t size) {
  auto x = static_cast<const T*>(from);
  const float factor = 1.0f / __builtin_sqrtf(mean_square(x, size) + eps);
  finish(x, 0.0f, factor, static_cast<const T*>(weight), static_cast<const T*>(onto), static_cast<T*>(to), size);
}

template <typename T>
void centred(const void* from, const void* weight, float eps, const void* onto, void* to, int64_t size) {
  auto x = static_cast<const T*>(from);
  F32 sum{}, squares{};
  for_lanes(size, [&](auto load, auto, int64_t i) { sum = sum + load(x + i); });
  const float mean = sum_across(sum) / static_cast<float>(size);
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) { // no lanes beyond the end: the mean would be subtracted from their zeros
    const F32 v = load(x + i) - mean;
    squares = fma(v, v, squares);
  }
  float square = sum_across(squares);
  for (; i < size; ++i) {
    const float v = load_first(x + i, 1)[0] - mean;
    square += v * v;
  }
  const float factor = 1.0f / __builtin_sqrtf(square / static_cast<float>(size) + eps);
  finish(x, mean, factor, static_cast<const T*>(weight), static_cast<const T*>(onto), static_cast<T*>(to), size);
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(RmsNormKernels, rms_norm_kernels) = {
    {MLXINFER_ISA::row<float>, MLXINFER_ISA::row<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::row<MLXINFER_ISA::Half>},
    {MLXINFER_ISA::centred<float>, MLXINFER_ISA::centred<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::centred<MLXINFER_ISA::Half>}};
}
