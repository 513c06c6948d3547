#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// Some queries of a head and how far their attention has come; see Partial.
struct PatchTile {
  const float* queries; // [dim][rows], scaled so that scores are exponents of 2
  const float* keys; // [blocks][dim][block_keys]
  const float* values; // [count][width]
  int64_t dim, width; // width: a multiple of the vector width
  int64_t count; // keys that are there
  float* out; // [rows][width]
  float* max; // [rows]
  float* sum; // [rows]
};

constexpr int kPatchStep = 128; // keys that are added at once

struct PatchKernels {
  int rows; // of a tile
  int block_keys; // divides kPatchStep
  int lanes; // of a vector
  // One row of a head to float32, times `scale`; with angles, each of `parts` equal parts rotates its halves. One per dtype.
  void (*load[3])(const void* from, int64_t dim, int parts, const float* cos, const float* sin, float scale, float* to);
  // Adds the kPatchStep keys from `first` on, a multiple of it, as far as they are there.
  void (*add)(const PatchTile& tile, int64_t first);
  // One row: out = partial / sum. One per dtype.
  void (*finish[3])(const float* partial, float sum, int64_t dim, void* out);
};

MLXINFER_DECLARE_KERNELS(PatchKernels, patch_kernels)

} // namespace mlxinfer::cpu
