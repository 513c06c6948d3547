#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention/pages.h"
#include "check.h"

namespace mlxinfer::cpu::check {

// Pages of one form, of all heads, in memory of exactly their size.
class Pool {
 public:
  Pool(const PageForm& form, int64_t heads, int64_t pages)
      : form_(form), count_(pages), data_(static_cast<size_t>(heads * pages * form.bytes())),
        scales_(static_cast<size_t>(heads * pages * form.scale_bytes())) {}

  PagePool pool() {
    return {data_.data(), scales_.data(), count_};
  }

  void copy(const Pool& from, int64_t head, int64_t from_page, int64_t page) {
    auto one = [&](std::vector<char>& to, const std::vector<char>& source, int64_t size) {
      std::copy_n(source.data() + (head * from.count_ + from_page) * size, size, to.data() + (head * count_ + page) * size);
    };
    one(data_, from.data_, form_.bytes());
    one(scales_, from.scales_, form_.scale_bytes());
  }

  // Value i of a row, from codes bit by bit.
  double value(int64_t head, int64_t page, int64_t row, int64_t i) const {
    const char* data = data_.data() + (head * count_ + page) * form_.bytes() + row * form_.row_bytes();
    const int64_t bits = kFormBits[form_.form];
    if (!form_.has_codes()) {
      Floats number(static_cast<Float>(form_.form), 1);
      std::copy_n(data + i * bits / 8, bits / 8, number.data());
      return number[0];
    }
    int64_t code = 0;
    for (int64_t bit = 0; bit < bits; ++bit) {
      const int64_t at = i * bits + bit;
      code |= static_cast<int64_t>((data[at / 8] >> (at % 8)) & 1) << bit;
    }
    auto scale = [&](int64_t which) {
      uint16_t half;
      const int64_t groups = form_.groups(), place = (which * form_.rows + row) * groups + i / form_.group;
      std::memcpy(&half, scales_.data() + (head * count_ + page) * form_.scale_bytes() + place * 2, 2);
      return static_cast<double>(half_to_float(half));
    };
    return scale(1) + scale(0) * static_cast<double>(code);
  }

 private:
  PageForm form_;
  int64_t count_;
  std::vector<char> data_, scales_;
};

} // namespace mlxinfer::cpu::check
