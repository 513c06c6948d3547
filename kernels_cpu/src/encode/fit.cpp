#include "encode/fit.h"

#include "op/bindings.h"
#include "op/refuse.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Fills codes `[rows, in]`, scales and biases `[rows, in / group]`.
void fit_affine(
    const Matrix<const float>& weight,
    const Matrix<const float>& importance,
    int bits,
    int stored,
    const Matrix<uint8_t>& codes,
    const Matrix<float>& scales,
    const Matrix<float>& biases) {
  const size_t rows = weight.shape(0), columns = weight.shape(1), groups = scales.shape(1);
  const size_t size = groups == 0 ? 0 : columns / groups;
  const bool alike = importance.shape(0) == 1;
  if (bits < 1 || bits > 8 || stored < 0 || stored > 2 || size * groups != columns || size % 32 != 0 || importance.shape(1) != columns ||
      (!alike && importance.shape(0) != rows) || codes.shape(0) != rows || codes.shape(1) != columns || scales.shape(0) != rows ||
      biases.shape(0) != rows || biases.shape(1) != groups) {
    refuse("fit_affine", "shapes do not belong together, or there is no such format.");
  }
  nb::gil_scoped_release release;
  parallel_for(rows, 4, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      for (size_t group = 0; group < groups; ++group) {
        const size_t at = row * columns + group * size, out = row * groups + group;
        const float* weights = importance.data() + (alike ? group * size : at);
        fit_kernels().group(weight.data() + at, weights, static_cast<int>(size), bits, static_cast<Stored>(stored), codes.data() + at,
                            scales.data() + out, biases.data() + out);
      }
    }
  });
}

} // namespace

void bind_fit(nb::module_& m) {
  m.def("fit_affine", &fit_affine, "weight"_a, "importance"_a, "bits"_a, "stored"_a, "codes"_a, "scales"_a, "biases"_a);
}

} // namespace mlxinfer::cpu
