#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

struct ThresholdKernels {
  float (*exp_sum)(const float* x, int64_t size, float highest); // of exp(x - highest)
  int64_t (*collect)(const float* x, int64_t size, float least, float* out); // all x >= least, in order; how many
};

MLXINFER_DECLARE_KERNELS(ThresholdKernels, threshold_kernels)

} // namespace mlxinfer::cpu
