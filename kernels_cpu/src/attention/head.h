#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// One per dtype of what is read; `norm` has the same one.
struct HeadKernels {
  // A head to float32: divided by its root mean square and multiplied by `norm`, if that is not null; of the pairs (i, i + half) each
  // turned by the angle whose cosine and sine are turn[i] and turn[half + i], if half is not 0; and scaled.
  void (*prepare[3])(const void* from, int64_t dim, const void* norm, float eps, const float* turn, int64_t half, float scale, float* to);
  void (*convert[3][3])(const void* from, int64_t size, void* to); // [from][to]
};

MLXINFER_DECLARE_KERNELS(HeadKernels, head_kernels)

} // namespace mlxinfer::cpu
