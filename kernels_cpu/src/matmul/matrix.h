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

// With nested scales, codes are multiplied by the scales of their groups when they are spread: they become integers of one byte, or
// 256 * first + second. `codes` is then [nests][4][bytes][16] lanes of 16 times four columns, `scales` is [nests] of one scale and the biases of the
// groups, [16] each.
constexpr int nested_bytes(Code c) {
  return c == Code::halves2 || c == Code::halves3 ? 1 : 2;
}
constexpr int nested_scales(Code c) {
  return (1 + (nest_has_biases(c) ? kNestBlocks * (has_halves(c) ? 2 : 1) : 0)) * kPanelRows;
}

struct MatrixKernels {
  void (*spread[kCodes])(const Panel& panel, const SpreadPanel& to);
  // `x.q` lies by rows: [blocks][planes][rows][32]. `out` is [rows][16].
  void (*tile[2][kCodes])(const SpreadPanel& panel, const IntegerTile& x, float* out); // by planes - 1
};

// Two panels and tiles of rows, one after the other: `x` is the first, the next one has its q `planes * rows * columns` bytes further
// and all else `rows * blocks` numbers, with biases or starts `rows * groups`. `x.q` lies by rows: [nests][4][planes][rows][64].
// `out` is [panels][tiles][rows][16].
struct NestedMatrixKernels {
  void (*spread[kCodes])(const Panel& panel, const SpreadPanel& to);
  void (*tiles[2][kCodes])(const SpreadPanel* panels, const NestedTile& x, int64_t count, float* out); // by planes - 1
};

MLXINFER_DECLARE_KERNELS(MatrixKernels, matrix_kernels)
MLXINFER_DECLARE_KERNELS(NestedMatrixKernels, nested_matrix_kernels)

} // namespace mlxinfer::cpu
