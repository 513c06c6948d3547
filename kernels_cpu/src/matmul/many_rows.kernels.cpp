#include "matmul/many_rows.h"

#include "simd/block.h"
#include "simd/floats.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr int kColumns = kTallVectors * kWidth, kPanels = kColumns / kPanelRows; // 0 panels: the vectors are too short
constexpr int kHalf = kBlockColumns / 2;

template <typename T>
void spread(const Panel* panels, int64_t first, int64_t blocks, float* to) {
  for (int p = 0; p < kPanels; ++p) {
    auto from = reinterpret_cast<const T*>(panels[p].blocks) + first * kBlockColumns * kPanelRows;
    float* column = to + p * kPanelRows;
    for (int64_t i = 0; i < blocks * kBlockColumns; ++i, from += kPanelRows, column += kColumns) {
      MLXINFER_UNROLL
      for (int j = 0; j < kPanelRows; j += kWidth) {
        store(column + j, load(from + j));
      }
    }
  }
}

using Sums = F32[kTallRows][kTallVectors];

// The products of half a block's columns, one after the other.
MLXINFER_INLINE void multiply_half(const float* weights, const float* x, Sums& sums) {
  MLXINFER_UNROLL
  for (int m = 0; m < kTallRows; ++m) {
    MLXINFER_UNROLL
    for (int j = 0; j < kTallVectors; ++j) {
      sums[m][j] = F32{};
    }
  }
  for (int i = 0; i < kHalf; ++i, x += kTallRows, weights += kColumns) {
    F32 w[kTallVectors];
    MLXINFER_UNROLL
    for (int j = 0; j < kTallVectors; ++j) {
      w[j] = load(weights + j * kWidth);
    }
    MLXINFER_UNROLL
    for (int m = 0; m < kTallRows; ++m) {
      F32 factor = broadcast(x[m]);
      MLXINFER_UNROLL
      for (int j = 0; j < kTallVectors; ++j) {
        sums[m][j] = fma(w[j], factor, sums[m][j]);
      }
    }
  }
}

// The sums of two halves of a block are added before they are added to the rest, as FloatKernels do.
void tile(const float* weights, int64_t blocks, const float* x, float* out) {
  // Totals of its own need no reloads: `out` might overlap with what is read.
  alignas(64) float first[kTallRows * kColumns], total[kTallRows * kColumns];
  memcpy(total, out, sizeof(total));
  for (int64_t b = 0; b < blocks; ++b, x += kBlockColumns * kTallRows, weights += kBlockColumns * kColumns) {
    Sums sums;
    multiply_half(weights, x, sums);
    MLXINFER_UNROLL
    for (int m = 0; m < kTallRows; ++m) {
      MLXINFER_UNROLL
      for (int j = 0; j < kTallVectors; ++j) {
        store(first + m * kColumns + j * kWidth, sums[m][j]);
      }
    }
    multiply_half(weights + kHalf * kColumns, x + kHalf * kTallRows, sums);
    MLXINFER_UNROLL
    for (int m = 0; m < kTallRows; ++m) {
      MLXINFER_UNROLL
      for (int j = 0; j < kTallVectors; ++j) {
        const int at = m * kColumns + j * kWidth;
        store(total + at, load(total + at) + (load(first + at) + sums[m][j]));
      }
    }
  }
  memcpy(out, total, sizeof(total));
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(ManyRowsKernels, many_rows_kernels) = {
    kPanels == 0 ? 0 : kTallRows, kPanels, {spread<float>, spread<Bfloat>, spread<Half>}, tile};
} // namespace mlxinfer::cpu
