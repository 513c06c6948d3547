#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// Steps around the tiles; arrays of three are by dtype: float32, bfloat16, float16.
struct ActivationKernels {
  // A row to float32, zeros from `size` to `padded`, and normalized (x / rms(x) * weight) where `weight` is not null. False where an
  // element of the result is infinite or NaN.
  bool (*load[3])(const void* x, const void* weight, float eps, int64_t size, int64_t padded, float* out);

  // Row `m` of a tile of `rows` rows, quantized; see IntegerTile. `by_rows`: its q lies as matrix units read it; see MatrixKernels.
  void (*quantize[2])(
      const float* x, int64_t blocks, int rows, int m, bool by_rows, int8_t* q, float* scales, float* sums, float* half_sums, int32_t* code_sums);

  // The same for nested scales of groups of 32 columns, or of 16 (`halves`); see NestedTile. `zero`: the code that means zero.
  void (*quantize_nests[2])(
      const float* x, int64_t nests, int rows, int m, bool by_rows, bool halves, int zero, int8_t* q, float* scales, float* sums, int32_t* starts);

  // Row `m` of a tile of `rows` rows as it is; see FloatTile.
  void (*place)(const float* x, int64_t blocks, int rows, int m, float* tile, float* sums);
};

enum class Gate : int { silu, gelu_tanh };
constexpr int kGates = 2;

// One row of up to 16 results of one panel. Pointers are to the panel's first column; null where there is none.
struct FinishKernels {
  // out = x + bias + residual
  void (*plain[3])(const float* x, int columns, const void* bias, const void* residual, void* out);
  // out = gate(x + bias) * (up + up_bias)
  void (*gated[3][kGates])(const float* x, const float* up, int columns, const void* bias, const void* up_bias, void* out);
};

MLXINFER_DECLARE_KERNELS(ActivationKernels, activation_kernels)
MLXINFER_DECLARE_KERNELS(FinishKernels, finish_kernels)

} // namespace mlxinfer::cpu
