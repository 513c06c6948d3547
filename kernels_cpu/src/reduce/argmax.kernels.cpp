#include "reduce/argmax.h"

#include "simd/floats.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

float highest(const float* x, int64_t size) {
  F32 most[4];
  for (auto& m : most) {
    m = broadcast(-__builtin_inff());
  }
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    MLXINFER_UNROLL
    for (int j = 0; j < 4; ++j) {
      most[j] = max(load(x + i + j * kWidth), most[j]);
    }
  }
  float result = max_across(max(max(most[0], most[1]), max(most[2], most[3])));
  for (; i < size; ++i) {
    result = x[i] > result ? x[i] : result;
  }
  return result;
}

int64_t find(const float* x, int64_t size, float value) {
  for (int64_t i = 0; i < size; ++i) {
    if (x[i] == value) {
      return i;
    }
  }
  return 0;
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(ArgmaxKernels, argmax_kernels) = {MLXINFER_ISA::highest, MLXINFER_ISA::find};
}
