#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "attention/head.h"

namespace mlxinfer::cpu {

// Cosines and sines of a step's rows, for all layers. Shared as a plan is.
class Rotation : public std::enable_shared_from_this<Rotation> {
 public:
  // (radians per position, position of the first row, rows) of each segment in order.
  using Part = std::tuple<std::vector<double>, int64_t, int64_t>;
  explicit Rotation(const std::vector<Part>& parts);

  const float* row(int64_t i) const {
    return data_.data() + i * 2 * half;
  }
  int64_t rows = 0, half = 0;

 private:
  std::vector<float> data_;
};

// Rows of heads in memory and what is done with each head when it is read. Where some channels are still, the norm is for these alone, and
// rotation for those after them, which may lie elsewhere.
struct Heads {
  const char* data;
  int64_t row_stride, head_stride; // bytes
  int64_t dim;
  int dtype; // in tables of kernels
  const void* norm = nullptr;
  float eps = 0;
  const Rotation* rotation = nullptr;
  int64_t still = 0;
  const char* turned = nullptr; // the channels after the still ones, if they lie elsewhere
  int64_t turned_row_stride = 0, turned_head_stride = 0; // bytes
  const float* gain = nullptr; // [dim]: what channels are multiplied with in the end, or null

  const char* at(int64_t row, int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
  bool is_plain() const {
    return norm == nullptr && rotation == nullptr;
  }
  void prepare(int64_t row, int64_t head, float scale, float* to) const {
    const auto kernel = head_kernels().prepare[dtype];
    const float* turn = rotation == nullptr ? nullptr : rotation->row(row);
    const int64_t half = rotation == nullptr ? 0 : rotation->half;
    if (still == 0) {
      kernel(at(row, head), dim, norm, eps, turn, half, scale, to);
    } else {
      const char* rest = turned == nullptr ? at(row, head) + still * (dtype == 0 ? 4 : 2) : turned + row * turned_row_stride + head * turned_head_stride;
      kernel(at(row, head), still, norm, eps, nullptr, 0, scale, to);
      kernel(rest, dim - still, nullptr, 0.0f, turn, half, scale, to + still);
    }
    for (int64_t i = 0; gain != nullptr && i < dim; ++i) {
      to[i] *= gain[i];
    }
  }
};

} // namespace mlxinfer::cpu
