#include "encode/feedback.h"

#include "simd/floats.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// To the nearest whole number, ties to even; exact below 2^22.
MLXINFER_INLINE F32 nearest(F32 v) {
  return (v + 12582912.0f) - 12582912.0f;
}

void strip(const FeedbackColumns& c, int64_t first, int rows) {
  float errors[kMostColumns][kWidth];
  const F32 top = broadcast(static_cast<float>((1 << c.bits) - 1));
  for (int column = 0; column < c.count; ++column) {
    const float* weights = c.factor + static_cast<int64_t>(column) * c.count;
    F32 sums[4] = {};
    int before = 0;
    for (; before + 4 <= column; before += 4) {
      MLXINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[i] += load(errors[before + i]) * weights[before + i];
      }
    }
    for (; before < column; ++before) {
      sums[0] += load(errors[before]) * weights[before];
    }
    const int64_t at = column * c.stride + first, group = c.group_of[column] * c.stride + first;
    const F32 scale = rows == kWidth ? load(c.scales + group) : load_first(c.scales + group, rows);
    const F32 bias = rows == kWidth ? load(c.biases + group) : load_first(c.biases + group, rows);
    const F32 target = rows == kWidth ? load(c.target + at) : load_first(c.target + at, rows);
    const F32 plain = rows == kWidth ? load(c.plain + at) : load_first(c.plain + at, rows);
    const F32 corrected = target + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const F32 code = nearest(min(max((corrected - bias) / scale, F32{}), top));
    const F32 error = plain - (code * scale + bias);
    store(errors[column], error);
    for (int lane = 0; lane < rows; ++lane) {
      c.codes[at + lane] = static_cast<uint8_t>(code[lane]);
      c.errors[at + lane] = error[lane];
    }
  }
}

void columns(const FeedbackColumns& c, int64_t first, int64_t rows) {
  for (const int64_t end = first + rows; first < end; first += kWidth) {
    strip(c, first, end - first < kWidth ? static_cast<int>(end - first) : kWidth);
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(FeedbackKernels, feedback_kernels) = {MLXINFER_ISA::columns};
}
