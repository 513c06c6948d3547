#include "reduce/masked.h"

#include <algorithm>
#include <vector>

#include "op/bindings.h"
#include "op/op.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kPieceElements = 8192; // some microseconds of work, and whole words

// Inputs: numbers, and words of bits.
class Masked : public Operation {
 public:
  using Operation::Operation;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    if (outputs[0].size() == 0) {
      return;
    }
    encoder().dispatch([x = rows_of(inputs[0], encoder()), allowed = rows_of(inputs[1], encoder()), out = outputs[0].data<float>()] {
      const int64_t pieces = (x.size + kPieceElements - 1) / kPieceElements;
      parallel_for(static_cast<size_t>(x.count * pieces), 1, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
          const auto row = static_cast<int64_t>(i) / pieces, at = static_cast<int64_t>(i) % pieces * kPieceElements;
          masked_kernels().row(x.row<float>(row) + at, allowed.row<uint32_t>(row) + at / 32, std::min(kPieceElements, x.size - at),
                               out + row * x.size + at);
        }
      });
    });
  }

  const char* name() const override {
    return "mlxinfer.masked";
  }
};

mx::array masked(const mx::array& x, const mx::array& allowed) {
  if (x.ndim() != 2 || x.dtype() != mx::float32 || allowed.ndim() != 2 || allowed.dtype() != mx::uint32 ||
      allowed.shape(0) != x.shape(0) || allowed.shape(1) != (x.shape(1) + 31) / 32) {
    refuse("masked", "x must be float32 [rows, n], not " + dtype_text(x) + " " + shape_text(x.shape()) +
                         ", with bits in uint32 [rows, n / 32], not " + dtype_text(allowed) + " " + shape_text(allowed.shape()) + ".");
  }
  return mx::array(x.shape(), mx::float32, std::make_shared<Masked>(cpu_stream()), {x, allowed});
}

} // namespace

void bind_masked(nb::module_& m) {
  m.def("masked", &masked, "x"_a, "allowed"_a);
}

} // namespace mlxinfer::cpu
