#include "mixture/mixture.h"

#include "simd/floats.h"
#include "simd/math.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <typename T>
void widen_row(const void* from, float* out, int64_t size) {
  auto x = static_cast<const T*>(from);
  for_lanes(size, [=](auto load, auto store, int64_t i) { store(out + i, load(x + i)); });
}

template <typename T>
void sum_rows(const void* from, int64_t stride, const float* shares, int64_t count, const void* base, void* to, int64_t size) {
  auto x = static_cast<const T*>(from), onto = static_cast<const T*>(base);
  auto y = static_cast<T*>(to);
  for_lanes(size, [=](auto load, auto store, int64_t i) {
    F32 v = onto == nullptr ? F32{} : load(onto + i);
    for (int64_t j = 0; j < count; ++j) {
      v = fma(broadcast(shares[j]), load(x + j * stride + i), v);
    }
    store(y + i, v);
  });
}

template <typename T, Unit U>
void gate(const void* gates, const void* from, float alpha, float limit, void* to, int64_t size) {
  auto g = static_cast<const T*>(gates), x = static_cast<const T*>(from);
  auto y = static_cast<T*>(to);
  for_lanes(size, [=](auto load, auto store, int64_t i) {
    F32 v = load(g + i);
    if constexpr (U == Unit::sigmoid) {
      v = sigmoid(v) * load(x + i);
    } else if constexpr (U == Unit::silu) {
      v = alpha * v;
      v = v * sigmoid(v) * load(x + i);
    } else if constexpr (U == Unit::gelu_tanh) {
      v = alpha * v;
      v = v * sigmoid(1.5957691216f * (v + 0.044715f * v * v * v)) * load(x + i);
    } else if constexpr (U == Unit::clamped_swiglu) {
      v = min(v, broadcast(limit));
      v = v * sigmoid(alpha * v) * (min(max(load(x + i), broadcast(-limit)), broadcast(limit)) + 1.0f);
    } else {
      v = max(v, F32{});
      v = v * v;
    }
    store(y + i, v);
  });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_UNITS_(T)                                                                                                 \
  {MLXINFER_ISA::gate<T, Unit::sigmoid>, MLXINFER_ISA::gate<T, Unit::silu>, MLXINFER_ISA::gate<T, Unit::gelu_tanh>, \
   MLXINFER_ISA::gate<T, Unit::clamped_swiglu>, MLXINFER_ISA::gate<T, Unit::relu_squared>}
MLXINFER_DEFINE_KERNELS(MixtureKernels, mixture_kernels) = {
    {MLXINFER_ISA::widen_row<float>, MLXINFER_ISA::widen_row<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::widen_row<MLXINFER_ISA::Half>},
    {MLXINFER_ISA::sum_rows<float>, MLXINFER_ISA::sum_rows<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::sum_rows<MLXINFER_ISA::Half>},
    {MLXINFER_UNITS_(float), MLXINFER_UNITS_(MLXINFER_ISA::Bfloat), MLXINFER_UNITS_(MLXINFER_ISA::Half)}};
}
