#pragma once

#include "op/op.h"

namespace mlxinfer::cpu {

// Every row x normed, weighted and added to `onto` where there is one; see RmsNormKernels. `out` is contiguous and may be `onto`.
struct NormRows {
  Rows x;
  const void* weight; // or null
  float eps;
  Rows onto; // or data null
  void* out;
  Float dtype; // of all

  void run() const;
};

} // namespace mlxinfer::cpu
