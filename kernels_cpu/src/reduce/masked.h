#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

struct MaskedKernels {
  // `x` where its bit of `words` is set, lowest first, and minus infinity elsewhere.
  void (*row)(const float* x, const uint32_t* words, int64_t size, float* out);
};

MLXINFER_DECLARE_KERNELS(MaskedKernels, masked_kernels)

} // namespace mlxinfer::cpu
