#pragma once

#include <cstdint>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

struct SiluMultiplyKernels {
  // out[i] = silu(gate[i]) * up[i]; by dtype: float32, bfloat16, float16.
  void (*row[3])(const void* gate, const void* up, void* out, int64_t size);
};
MLXINFER_DECLARE_KERNELS(SiluMultiplyKernels, silu_multiply_kernels)

} // namespace mlxinfer::cpu
