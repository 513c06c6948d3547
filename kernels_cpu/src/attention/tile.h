#pragma once

#include <stdint.h>

#include "attention/form.h"
#include "dispatch/isa.h"

namespace mlxinfer::cpu {

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
  float* room; // [kBlockRows][key_dim]
  int64_t rows, heads_per_kv, first;
  int64_t key_dim, value_width; // value_width: a multiple of the vector width
  int64_t window; // positions that a query sees, itself included
  float softcap; // 0: none
};

// Rows of numbers of any form, `stride` bytes apart.
struct PageRows {
  const void* data;
  int64_t stride;
  int form;
};

// Values with scales have groups that are whole vectors.
struct PageTile {
  PageRows keys; // [key_dim][kPageTokens]
  PageRows values; // [kPageTokens][value_width]
  const void* key_scales; // null, or float16 [2][key_dim]: a key is bias + scale * number
  const float* value_scales; // null, or [value_width / group][2][kPageTokens]
  int64_t value_group;
  int64_t first; // position of the first token
  int64_t tokens; // that are there
  bool cold; // nobody has prefetched the keys
  const void* next; // memory that is read after this page
  int64_t next_bytes;
};

constexpr int kBlockRows = 6; // of queries: what is computed together, from one look at a page

struct AttentionKernels {
  int width; // lanes of a vector
  // Adds a page to rows [begin, end) of a tile. A row's result does not depend on the other rows.
  void (*add_page)(const QueryTile& tile, const PageTile& page, const Partial& done, int64_t begin, int64_t end);
  // `into` becomes what it would be had it seen the pages of both, up to rounding.
  void (*merge)(const Partial& into, const Partial& other, int64_t rows, int64_t value_width);
  // out = partial out / sum, for one row; a sink takes part in the sum. One per dtype.
  void (*finish[3])(const float* partial, float max, float sum, const float* sink, void* out, int64_t dim);
};

// c = keep * c + add + a b, or add + a b where `keep` is null: a [rows][depth], b [depth][width], c [rows][width]; keep and add have one
// number for each row. `soon` is memory that is read next; a `cold` b was not prefetched in this way.
struct PageProduct {
  int rows; // 1 to kBlockRows
  const float* a;
  int64_t a_stride; // numbers
  int64_t depth;
  const void* b;
  int64_t b_stride; // bytes
  int64_t width; // a multiple of the vector width
  float* c;
  int64_t c_stride; // numbers
  const float *keep, *add;
  const void* soon;
  int64_t soon_bytes;
  bool cold;
};
struct PageProductKernels {
  void (*multiply[kForms])(const PageProduct& product);
};

struct PageKernels {
  // Keys of tokens, to channels: [dim][kPageTokens]. What the last vector has behind `tokens` is of some token, too. One per dtype.
  void (*turn[3])(const void* page, int64_t tokens, int64_t dim, float* to);
  // Numbers, to [rows][width]; what the last vector of a row has behind `size` is zero.
  void (*unpack[kForms])(const PageRows& from, int64_t rows, int64_t size, int64_t width, float* to);
  // float16 scales and biases [2][rows][groups] to [groups][2][rows]. `room` has rows * groups.
  void (*scales)(const void* from, int64_t rows, int64_t groups, float* room, float* to);
  // Unpacked codes to values, in place.
  void (*dequantize)(const void* scales, const PageForm& form, int64_t width, float* tile);
};

struct SealKernels {
  // Rows of a dtype to codes and scales of `form`: the scale of a group is that of its range, rounded up to float16, above a bias rounded
  // down, so that a constant group comes back as it was. Whatever is not finite spoils its group only.
  void (*seal[3])(const void* from, const PageForm& form, void* codes, void* scales);
};

MLXINFER_DECLARE_KERNELS(AttentionKernels, attention_kernels)
MLXINFER_DECLARE_KERNELS(PageProductKernels, page_product_kernels)
MLXINFER_DECLARE_KERNELS(PageKernels, page_kernels)
MLXINFER_DECLARE_KERNELS(SealKernels, seal_kernels)

} // namespace mlxinfer::cpu
