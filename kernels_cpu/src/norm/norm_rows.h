#pragma once

#include "op/op.h"

namespace mlxinfer::cpu {

// Every row x normed, weighted and added to `onto` where there is one; see RmsNormKernels. `out` may be `onto` or x.
struct NormRows {
  Rows x;
  const void* weight; // or null
  float eps;
  Rows onto; // or data null
  void* out;
  Float dtype; // of all
  int64_t out_stride = 0; // 0: rows are contiguous
  bool centring = false; // whether the mean is subtracted first

  void run() const;
};

} // namespace mlxinfer::cpu
