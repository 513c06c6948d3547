#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "matmul/layout.h"

namespace mlxinfer::cpu {

// A block type of GGUF files that can be packed without loss, with the layout that it is packed in.
struct GgufType {
  std::string_view name;
  int columns, bytes; // of a block
  Code code;
  Scale scale;
  int group, zero; // see Layout
  // The planes of 32 columns from column 32 * `part` of a block on, of `count` rows that follow each other `row_bytes` apart: rows `first`
  // and on of the panel's block `to`.
  void (*planes)(const uint8_t* rows, int64_t row_bytes, int part, int first, int count, uint8_t* to);
  // Where the float16s of a block are: the scale, and the bias or what is subtracted, -1 where there is none.
  int scale_at, bias_at;
  // Nested only: the scales of the groups of a block, and the biases where there are any.
  void (*counts)(const uint8_t* block, int8_t* scales, int8_t* biases);

  Layout layout(int64_t n, int64_t k) const {
    return {code, scale, group, zero, n, k};
  }
};

std::span<const GgufType> gguf_types();
const GgufType* find_gguf_type(std::string_view name);

// Rows [first, first + count) of packed matrices `[matrices, n, k]`, whose rows are counted through, from blocks. Rows and columns
// that only fill up a panel must be zero already. False where a scale or bias is infinite or NaN.
bool pack_gguf(const GgufType& type, const Layout& layout, int64_t first, int64_t count, const uint8_t* rows, uint8_t* out);

} // namespace mlxinfer::cpu
