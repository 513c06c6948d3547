#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "matmul/activations.h"
#include "matmul/layout.h"
#include "op/rows.h"

namespace mlxinfer::cpu {

// y = finish(norm(x) @ weights.T), all pointers ready to be read. Nothing here knows of MLX's graph.
struct Product {
  Layout layout;
  const uint8_t* weights; // packed matrices, one per expert
  Precision precision; // of the activations
  Float dtype; // of everything but the weights

  Rows x; // [rows / x_repeats, k]
  int64_t rows;
  int64_t x_repeats; // this many neighbouring results read one row of x
  const void* norm; // [k] or null
  float eps;

  const int32_t* experts; // [rows] or null; values beyond the last mean the last, and rows with negative ones are not computed
  int64_t expert_count;

  const void* bias; // [expert_count, n] or null
  Rows residual; // [rows, n] or data null
  std::optional<Gate> gate; // the upper half of the n results gates the lower: y is [rows, n / 2]
  void* y; // contiguous
};

void multiply(const Product& product);

} // namespace mlxinfer::cpu
