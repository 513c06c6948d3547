#pragma once

#include <stdint.h>

#include "dispatch/isa.h"
#include "matmul/layout.h"

namespace mlxinfer::cpu {

// Rows of activations are multiplied in tiles of 16, 8, 4, 3, 2 or 1 rows. Three are a token and two drafts.
constexpr int kTileSizes = 6;
constexpr int kTileRows[kTileSizes] = {1, 2, 3, 4, 8, 16};
constexpr int kLargestTile = 16;

// Codes of most models. Others get fewer kernels: each is compiled where it is installed.
constexpr bool is_common(Code code) {
  return code == Code::affine4 || code == Code::affine8 || code == Code::halves6 || code == Code::mxfp4;
}

// Whether products with activations of `planes` planes, 0 for float32, have tiles of so many rows. Larger ones unpack each weight for more
// rows, until the sums no longer fit into registers (`largest`, of integers). Two and three rows are multiplied one by one in a precision
// that is not the default.
constexpr bool has_tile(Code code, int planes, int rows, int largest) {
  const bool small = rows == 2 || rows == 3;
  if (planes == 0) {
    return rows <= 8 && !(small && code <= Code::nvfp4);
  }
  return rows <= largest && !(small && planes == 1 && !is_common(code));
}

// One tile of activations, quantized per block of 32 columns: x = scale * q. An 8-bit q has one plane of bytes; one of 15 bits
// has two, q = 128 * first + second, both from -127 to 127.
struct IntegerTile {
  const int32_t* q; // [blocks][planes][8][rows], four columns each
  const float* scales; // [blocks][rows]
  const float* sums; // [blocks][rows] sum of x over the block
  const float* half_sums; // [blocks][2][rows] of each half of it
  const int32_t* code_sums; // [blocks][2][rows] sum of q over each half of the block
};

// One tile of activations for codes with nested scales, quantized per 256 columns, so that all sums within those are sums of
// integers: x = scale * q. An 8-bit q has one plane of bytes; one of 16 bits has two, q = 256 * first + second, from -127 and -128 to 127.
struct NestedTile {
  const int8_t* q; // [blocks][planes][8][rows] of four columns each, or as matrix units read it; see matrix.h
  const float* scales; // [nests][rows]
  const float* sums; // [groups][rows] sum of x over a group of columns that share a scale
  const int32_t* starts; // [groups][planes][rows] sum of q over a group, times minus the code that means zero
};

// One tile of activations in float32.
struct FloatTile {
  const float* x; // [blocks * 32][rows], zero beyond k
  const float* sums; // [blocks][2][rows] of each half of the block
};

struct Panel {
  const uint8_t* headers;
  const uint8_t* blocks;
  int64_t block_count;
  int blocks_per_group; // 1 where a block has two groups
  Scale scale;
  int scale_bytes; // of one scale
  bool has_biases;
  float zero; // affine without biases: the code that means zero
  int64_t ahead; // bytes to what is worth prefetching while a place is read: the next panel; for matrix units
  int64_t bytes;
  const uint8_t* next; // the panel that is read after this one
  int64_t distance; // bytes, at most `bytes`: how long before it is read memory is prefetched
};

// `out` is [rows][16].
using IntegerKernel = void (*)(const Panel& panel, const IntegerTile& x, float* out);
using NestedKernel = void (*)(const Panel& panel, const NestedTile& x, float* out);
using FloatKernel = void (*)(const Panel& panel, const FloatTile& x, float* out);

struct IntegerKernels {
  IntegerKernel tile[2][kCodes][kTileSizes]; // by planes - 1; null where there is none
};
// Of layouts with nested scales.
struct NestedKernels {
  NestedKernel tile[2][kCodes][kTileSizes]; // by planes - 1
};
struct FloatKernels {
  FloatKernel tile[kCodes][kTileSizes]; // null where there is none
  // For one row with infinity or NaN in it: dequantizes first, as a zero code times infinity is not what the weight times infinity is.
  FloatKernel careful[kCodes];
};

MLXINFER_DECLARE_KERNELS(IntegerKernels, integer_kernels)
MLXINFER_DECLARE_KERNELS(NestedKernels, nested_kernels)
MLXINFER_DECLARE_KERNELS(FloatKernels, float_kernels)

} // namespace mlxinfer::cpu
