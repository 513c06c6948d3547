#include "norm/rms_norm.h"

#include "norm/mean_square.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

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
