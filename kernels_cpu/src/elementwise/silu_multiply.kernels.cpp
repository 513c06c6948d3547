#include "elementwise/silu_multiply.h"

#include "simd/floats.h"
#include "simd/math.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <typename T>
void row(const void* gate, const void* up, void* out, int64_t size) {
  auto g = static_cast<const T*>(gate), u = static_cast<const T*>(up);
  auto y = static_cast<T*>(out);
  for_lanes(size, [=](auto load, auto store, int64_t i) {
    F32 x = load(g + i);
    store(y + i, x * sigmoid(x) * load(u + i));
  });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(SiluMultiplyKernels, silu_multiply_kernels) = {
    {MLXINFER_ISA::row<float>, MLXINFER_ISA::row<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::row<MLXINFER_ISA::Half>}};
}
