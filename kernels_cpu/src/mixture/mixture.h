#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// What is multiplied with a row: see GateRows.
enum class Unit : int { sigmoid, silu, gelu_tanh, clamped_swiglu, relu_squared };
constexpr int kUnits = 5;

// Rows of a mixture of experts, by the order of `Float`.
struct MixtureKernels {
  void (*widen[3])(const void* x, float* out, int64_t size);
  // out = onto + sum over i of shares[i] * x[i * stride], `onto` may be null
  void (*sum[3])(const void* x, int64_t stride, const float* shares, int64_t count, const void* onto, void* out, int64_t size);
  // out = unit(alpha * gate) * x, alpha for silu and gelu_tanh alone; the clamped one is min(gate, limit) * sigmoid(alpha * min(gate, limit))
  // * (clip(x, limit) + 1), and the squared one reads no x
  void (*gate[3][kUnits])(const void* gate, const void* x, float alpha, float limit, void* out, int64_t size);
};

MLXINFER_DECLARE_KERNELS(MixtureKernels, mixture_kernels)

} // namespace mlxinfer::cpu
