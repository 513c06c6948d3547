#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul/layout.h"

namespace mlxinfer::cpu {

// A matrix of one leading axis (experts), in MLX's packed form or plain; all contiguous.
struct Source {
  const void* weight; // codes: uint32 words; plain: floats of the layout's code
  const void* scales; // 32-bit or 16-bit floats, or bytes; null for plain
  const void* biases; // affine only
};

// The packed form of `count` matrices, one after the other, `layout.panels() * layout.panel_bytes()` bytes each.
// `source_scale` is what the source's scales are; the layout's may be narrower where that loses nothing.
void pack(const Layout& layout, Scale source_scale, int64_t count, const Source& source, uint8_t* out);

// Whether every one of `count` floats is a float16 or bfloat16 as well.
bool fits(const float* values, size_t count, Scale narrower);
bool bfloats_fit_half(const uint16_t* values, size_t count);

} // namespace mlxinfer::cpu
