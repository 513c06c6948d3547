#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// In which dtype scales are stored.
enum class Stored { float32, bfloat16, float16 };

// A group of `size` numbers, a multiple of 32, to codes of `bits` bits: those of the scale and bias that minimise
// `sum(importance * (x - decoded)^2)` among those tried, judged as they are stored.
struct FitKernels {
  void (*group)(const float* x, const float* importance, int size, int bits, Stored stored, uint8_t* codes, float* scale, float* bias);
};

MLXINFER_DECLARE_KERNELS(FitKernels, fit_kernels)

} // namespace mlxinfer::cpu
