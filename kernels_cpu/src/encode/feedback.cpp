#include "encode/feedback.h"

#include "op/bindings.h"
#include "op/refuse.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Groups = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Fills codes and errors `[columns, rows]`, both in the order in which the columns are given.
void feed_back(
    const Matrix<const float>& plain,
    const Matrix<const float>& target,
    const Matrix<const float>& factor,
    const Matrix<const float>& scales,
    const Matrix<const float>& biases,
    const Groups& group_of,
    int bits,
    const Matrix<uint8_t>& codes,
    const Matrix<float>& errors) {
  const size_t count = plain.shape(0), rows = plain.shape(1), groups = scales.shape(0);
  auto alike = [&](const auto& other) { return other.shape(0) == count && other.shape(1) == rows; };
  if (bits < 1 || bits > 8 || count > static_cast<size_t>(kMostColumns) || !alike(target) || !alike(codes) || !alike(errors) ||
      factor.shape(0) != count || factor.shape(1) != count || scales.shape(1) != rows || biases.shape(0) != groups ||
      biases.shape(1) != rows || group_of.shape(0) != count) {
    refuse("feed_back", "shapes do not belong together, or there are too many columns.");
  }
  for (size_t column = 0; column < count; ++column) {
    if (group_of.data()[column] < 0 || static_cast<size_t>(group_of.data()[column]) >= groups) {
      refuse("feed_back", "a column belongs to a group that is not there.");
    }
  }
  const FeedbackColumns work{plain.data(),    target.data(), factor.data(), scales.data(),          biases.data(),
                             group_of.data(), codes.data(),  errors.data(), static_cast<int64_t>(rows), static_cast<int>(count),
                             bits};
  nb::gil_scoped_release release;
  parallel_for(rows, 64, [&](size_t begin, size_t end) {
    feedback_kernels().columns(work, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
  });
}

} // namespace

void bind_feedback(nb::module_& m) {
  m.def("feed_back", &feed_back, "plain"_a, "target"_a, "factor"_a, "scales"_a, "biases"_a, "group_of"_a, "bits"_a, "codes"_a, "errors"_a);
}

} // namespace mlxinfer::cpu
