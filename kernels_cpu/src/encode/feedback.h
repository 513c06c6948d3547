#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// The innermost part of error feedback (GPTQ): `count` columns of a few rows of a matrix to codes, one column after another, each
// corrected for the errors of those before it. Columns lie `stride` numbers apart, the rows of a column next to each other.
struct FeedbackColumns {
  const float* plain; // `[count, stride]`
  const float* target; // the same, corrected for the errors of columns before these
  const float* factor; // `[count, count]`: row c holds the weights of the errors of columns 0 to c - 1 in column c
  const float* scales; // `[groups, stride]`
  const float* biases; // the same
  const int32_t* group_of; // the group of each column `[count]`
  uint8_t* codes; // `[count, stride]`, as all that is found
  float* errors; // plain number minus decoded one
  int64_t stride;
  int count; // at most kMostColumns
  int bits;
};

constexpr int kMostColumns = 128;

struct FeedbackKernels {
  // The rows from `first` on, `rows` of them. Scales are not zero.
  void (*columns)(const FeedbackColumns& c, int64_t first, int64_t rows);
};

MLXINFER_DECLARE_KERNELS(FeedbackKernels, feedback_kernels)

} // namespace mlxinfer::cpu
