#include "attention/heads.h"

#include <algorithm>
#include <cmath>

#include "op/refuse.h"

namespace mlxinfer::cpu {

Rotation::Rotation(const std::vector<Part>& parts) {
  size_t values = 0;
  for (const auto& [frequencies, first, count] : parts) {
    values += 2 * frequencies.size() * static_cast<size_t>(std::max<int64_t>(count, 0));
  }
  data_.reserve(values); // once: image rows are parts of one row each
  for (const auto& [frequencies, first, count] : parts) {
    const auto size = static_cast<int64_t>(frequencies.size());
    if (size == 0 || count < 1 || (half != 0 && size != half)) {
      refuse("Rotation", "every segment must have rows, and as many frequencies as the others.");
    }
    half = size;
    rows += count;
    for (int64_t position = first; position < first + count; ++position) {
      const size_t start = data_.size();
      data_.resize(start + static_cast<size_t>(2 * half));
      for (size_t i = 0; i < frequencies.size(); ++i) {
        const double angle = static_cast<double>(position) * frequencies[i];
        data_[start + i] = static_cast<float>(std::cos(angle));
        data_[start + frequencies.size() + i] = static_cast<float>(std::sin(angle));
      }
    }
  }
}

} // namespace mlxinfer::cpu
