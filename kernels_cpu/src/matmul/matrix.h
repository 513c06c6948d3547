#pragma once

#include <stdint.h>

#include "dispatch/isa.h"
#include "matmul/tile.h"

namespace mlxinfer::cpu {

// Products on a matrix unit (`has_matrix_unit`), with the numbers of the vector kernels, bit for bit: sums of integers are exact, and
// what is done with them is the same in the same order. A tile is `kLargestTile` rows.

// A panel whose codes lie as bytes and whose scales are float32, for all tiles that it is multiplied with.
struct SpreadPanel {
  uint8_t* codes; // [blocks][8][16] lanes of four columns
  float* scales; // [blocks][groups of a block][scale, bias][16]
  int64_t block_count;
};

constexpr int64_t kSpreadBlockBytes = 8 * kPanelRows * 4;
// Floats of a block's scales.
constexpr int64_t spread_scales(Code c) {
  return (has_halves(c) ? 2 : 1) * 2 * kPanelRows;
}

struct MatrixKernels {
  void (*spread[kCodes])(const Panel& panel, const SpreadPanel& to);
  // `x.q` lies by rows: [blocks][planes][rows][32]. `out` is [rows][16].
  void (*tile[2][kCodes])(const SpreadPanel& panel, const IntegerTile& x, float* out); // by planes - 1
};

MLXINFER_DECLARE_KERNELS(MatrixKernels, matrix_kernels)

} // namespace mlxinfer::cpu
