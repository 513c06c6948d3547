#pragma once

#include "attention/work.h"

namespace mlxinfer::cpu {

// Memory of a thread for a page.
struct Room {
  float* keys; // [dim][kPageTokens]
  float* values; // [kPageTokens][width]
  float* value_scales; // [groups][2][kPageTokens], and half as much again
  int64_t width; // of a row of values, in whole vectors
};

// A head's open page, of which `tokens` are there.
PageTile open_tile(const AttentionWork& work, const PlanSegment& segment, int64_t head, int64_t tokens, const Room& room);

// A full page for so many rows of queries: read where it lies, or, for many rows and where groups of values do not fill vectors, unpacked.
// Either way the same numbers meet in the same order.
PageTile full_tile(const AttentionWork& work, const Page& keys, const Page& values, int64_t rows, const Room& room);

} // namespace mlxinfer::cpu
