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

// Rows of heads in memory and what is done with each head when it is read.
struct Heads {
  const char* data;
  int64_t row_stride, head_stride; // bytes
  int64_t dim;
  int dtype; // in tables of kernels
  const void* norm = nullptr;
  float eps = 0;
  const Rotation* rotation = nullptr;

  const char* at(int64_t row, int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
  bool is_plain() const {
    return norm == nullptr && rotation == nullptr;
  }
  void prepare(int64_t row, int64_t head, float scale, float* to) const {
    const float* turn = rotation == nullptr ? nullptr : rotation->row(row);
    head_kernels().prepare[dtype](at(row, head), dim, norm, eps, turn, rotation == nullptr ? 0 : rotation->half, scale, to);
  }
};

} // namespace mlxinfer::cpu
