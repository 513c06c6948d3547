#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

constexpr int kPageTokens = 64;

// Query rows of one KV head and how far their attention has come: after some pages, `out` is the sum of exp(score - max) * value and
// `sum` that of exp(score - max).
struct Partial {
  float* out; // [rows][value_width]
  float* max; // [rows]
  float* sum; // [rows]
};

// Rows `t * heads_per_kv + head`, t counting tokens from position `first`.
struct QueryTile {
  const float* queries; // [rows][key_dim], scaled
  int64_t rows, heads_per_kv, first;
  int64_t key_dim, value_width; // value_width: a multiple of the vector width
  int64_t window; // positions that a query sees, itself included
  float softcap; // 0: none
};

struct PageTile {
  const float* keys; // [key_dim][kPageTokens]
  const float* values; // [kPageTokens][value_stride]
  int64_t value_stride;
  int64_t first; // position of the first token
  int64_t tokens; // that are there
};

struct AttentionKernels {
  int width; // lanes of a vector
  // Adds a page to the rows of a tile that see any of it. A row's result does not depend on the other rows.
  void (*add_page)(const QueryTile& tile, const PageTile& page, const Partial& done);
  // `into` becomes what it would be had it seen the pages of both, up to rounding.
  void (*merge)(const Partial& into, const Partial& other, int64_t rows, int64_t value_width);
  // out = partial out / sum, for one row; a sink takes part in the sum. One per dtype.
  void (*finish[3])(const float* partial, float max, float sum, const float* sink, void* out, int64_t dim);
};

// Pages to tiles, one function per dtype of the pages. Tokens from `tokens` on are zero. `soon` is memory that is read next.
struct Soon {
  const void *keys, *values;
  int64_t key_bytes, value_bytes;
};
struct PageKernels {
  void (*keys[3])(const void* page, int64_t tokens, int64_t dim, float* tile, Soon soon); // to [dim][kPageTokens]
  void (*values[3])(const void* page, int64_t tokens, int64_t dim, int64_t width, float* tile); // to [kPageTokens][width]
};

MLXINFER_DECLARE_KERNELS(AttentionKernels, attention_kernels)
MLXINFER_DECLARE_KERNELS(PageKernels, page_kernels)

} // namespace mlxinfer::cpu
