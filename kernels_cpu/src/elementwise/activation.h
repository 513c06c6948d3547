#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

constexpr int kActivations = 4;

struct ActivationFunctions {
  // out[i] = f(x[i]) in float32; f is gelu (within 2e-7 of the one with the error function), gelu_tanh, quick_gelu or silu. By dtype:
  // float32, bfloat16, float16.
  void (*apply[3][kActivations])(const void* x, void* out, int64_t size);
};
MLXINFER_DECLARE_KERNELS(ActivationFunctions, activation_functions)

} // namespace mlxinfer::cpu
