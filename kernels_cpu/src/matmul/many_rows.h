#pragma once

#include "dispatch/isa.h"
#include "matmul/tile.h"

namespace mlxinfer::cpu {

// Products of plain floats with so many rows that computing costs more than reading: weights are converted once for all tiles, and a larger
// block of sums stays in registers. The numbers are those of FloatKernels, bit for bit.
struct ManyRowsKernels {
  int rows; // of a tile, at most kLargestTile; 0: FloatKernels are as fast
  int panels; // that are multiplied at once, 1 or 2
  // Some blocks of panels of float32, bfloat16 or float16, to [blocks * 32][panels][16].
  void (*spread[3])(const Panel* panels, int64_t first, int64_t blocks, float* to);
  // Adds the products of those blocks to `out`, [rows][panels][16]. x is [blocks * 32][rows].
  void (*tile)(const float* weights, int64_t blocks, const float* x, float* out);
};

MLXINFER_DECLARE_KERNELS(ManyRowsKernels, many_rows_kernels)

} // namespace mlxinfer::cpu
