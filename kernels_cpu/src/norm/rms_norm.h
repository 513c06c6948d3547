#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// One row, by the order of `Float`: out = x / sqrt(mean(x^2) + eps) * weight + onto, in float32; weight and onto may be null.
struct RmsNormKernels {
  void (*row[3])(const void* x, const void* weight, float eps, const void* onto, void* out, int64_t size);
  // The same of x - mean(x).
  void (*centred[3])(const void* x, const void* weight, float eps, const void* onto, void* out, int64_t size);
};

MLXINFER_DECLARE_KERNELS(RmsNormKernels, rms_norm_kernels)

} // namespace mlxinfer::cpu
