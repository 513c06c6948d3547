#pragma once

#include <stdint.h>

#include "dispatch/isa.h"
#include "matmul/tile.h"

namespace mlxinfer::cpu {

// Products of few rows on a matrix unit (`has_matrix_unit`), with the numbers of the vector kernels, bit for bit. Below `kLeastFewRows`
// those are as fast, above 16 rows products whose codes are spread once for all of them are faster. Both planes of q are one operand, so
// that a block takes one product whatever the rows, and codes are unpacked as they are read.
constexpr int kLeastFewRows = 3, kMostFewRows = 8;

// Activations of 15 bits, q by rows: [blocks][planes][rows][32]. `out` is [count][rows][16].
using FewRowsKernel = void (*)(const Panel* panels, int64_t count, const IntegerTile& x, float* out);

struct FewRowsKernels {
  FewRowsKernel panels[kCodes][kMostFewRows - kLeastFewRows + 1]; // by rows; null where a code has none
};

MLXINFER_DECLARE_KERNELS(FewRowsKernels, few_rows_kernels)

} // namespace mlxinfer::cpu
