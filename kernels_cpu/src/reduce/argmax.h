#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

struct ArgmaxKernels {
  float (*highest)(const float* x, int64_t size); // NaN is passed over; minus infinity where there is nothing else
  int64_t (*find)(const float* x, int64_t size, float value); // where it is first, or 0
};

MLXINFER_DECLARE_KERNELS(ArgmaxKernels, argmax_kernels)

} // namespace mlxinfer::cpu
