#include "elementwise/activation.h"

#include "simd/floats.h"
#include "simd/math.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

enum class Activation : int { gelu, gelu_tanh, quick_gelu, silu };

// 1 - erf(x) for x >= 0, the approximation of Numerical Recipes' erfc (a polynomial in 1 / (1 + x / 2) within an exponential): a relative
// error of 1.2e-7 everywhere.
MLXINFER_INLINE F32 erfc(F32 x) {
  F32 t = 1.0f / (1.0f + 0.5f * x);
  F32 p = 0.17087277f * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * exp(p - x * x);
}

template <Activation A>
MLXINFER_INLINE F32 activate(F32 x) {
  if constexpr (A == Activation::gelu) {
    F32 half = 0.5f * x * erfc(abs(x) * 0.70710678f); // x times the share of the tail beyond |x|
    return x > 0.0f ? x - half : half;
  } else if constexpr (A == Activation::gelu_tanh) {
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); // 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  } else if constexpr (A == Activation::quick_gelu) {
    return x * sigmoid(1.702f * x);
  } else {
    return x * sigmoid(x);
  }
}

template <typename T, Activation A>
void apply(const void* x, void* out, int64_t size) {
  auto from = static_cast<const T*>(x);
  auto to = static_cast<T*>(out);
  for_lanes(size, [=](auto load, auto store, int64_t i) { store(to + i, activate<A>(load(from + i))); });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
#define MLXINFER_EACH_(T) \
  {apply<T, Activation::gelu>, apply<T, Activation::gelu_tanh>, apply<T, Activation::quick_gelu>, apply<T, Activation::silu>}
MLXINFER_DEFINE_KERNELS(ActivationFunctions, activation_functions) = {{MLXINFER_EACH_(float), MLXINFER_EACH_(Bfloat), MLXINFER_EACH_(Half)}};
} // namespace mlxinfer::cpu
