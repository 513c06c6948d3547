#pragma once

#include <cstdint>

#include "matmul/layout.h"

namespace mlxinfer::cpu {

// Row `row` of one packed matrix, dequantized.
void read_row(const Layout& layout, const uint8_t* weights, int64_t row, float* out);

} // namespace mlxinfer::cpu
