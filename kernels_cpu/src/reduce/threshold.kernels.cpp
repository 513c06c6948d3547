#include "reduce/threshold.h"

#include "simd/floats.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

float exp_sum(const float* x, int64_t size, float highest) {
  F32 sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kWidth <= size; i += 2 * kWidth) {
    sums[0] += exp(load(x + i) - highest);
    sums[1] += exp(load(x + i + kWidth) - highest);
  }
  float total = sum_across(sums[0] + sums[1]);
  for (; i < size; ++i) {
    total += exp(broadcast(x[i] - highest))[0];
  }
  return total;
}

int64_t collect(const float* x, int64_t size, float least, float* out) {
  int64_t count = 0, i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const F32 v = load(x + i);
    if (sum_across(v >= broadcast(least)) != 0) { // few vectors have any
      for (int lane = 0; lane < kWidth; ++lane) {
        out[count] = v[lane];
        count += v[lane] >= least;
      }
    }
  }
  for (; i < size; ++i) {
    out[count] = x[i];
    count += x[i] >= least;
  }
  return count;
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(ThresholdKernels, threshold_kernels) = {MLXINFER_ISA::exp_sum, MLXINFER_ISA::collect};
}
