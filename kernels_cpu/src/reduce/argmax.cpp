#include "reduce/argmax.h"

#include <algorithm>
#include <vector>

#include "op/bindings.h"
#include "op/op.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kPieceElements = 8192; // some microseconds of work

class Argmax : public Operation {
 public:
  using Operation::Operation;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    if (outputs[0].size() == 0) {
      return;
    }
    encoder().dispatch([x = rows_of(inputs[0], encoder()), out = outputs[0].data<uint32_t>()] {
      const int64_t pieces = (x.size + kPieceElements - 1) / kPieceElements;
      std::vector<float> highest(static_cast<size_t>(x.count * pieces));
      auto piece = [&](int64_t i) { return x.row<float>(i / pieces) + i % pieces * kPieceElements; };
      auto size = [&](int64_t i) { return std::min(kPieceElements, x.size - i % pieces * kPieceElements); };
      parallel_for(highest.size(), 1, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
          const auto at = static_cast<int64_t>(i);
          highest[i] = argmax_kernels().highest(piece(at), size(at));
        }
      });
      for (int64_t row = 0; row < x.count; ++row) {
        const auto first = highest.begin() + row * pieces;
        const int64_t best = std::max_element(first, first + pieces) - highest.begin();
        const int64_t within = argmax_kernels().find(piece(best), size(best), highest[static_cast<size_t>(best)]);
        out[row] = static_cast<uint32_t>(best % pieces * kPieceElements + within);
      }
    });
  }

  const char* name() const override {
    return "mlxinfer.argmax";
  }
};

mx::array argmax(const mx::array& x) {
  if (x.ndim() == 0 || x.shape(-1) == 0 || x.dtype() != mx::float32) {
    refuse("argmax", "x must be float32 [..., n], not " + dtype_text(x) + " " + shape_text(x.shape()) + ".");
  }
  return mx::array(mx::Shape(x.shape().begin(), x.shape().end() - 1), mx::uint32, std::make_shared<Argmax>(cpu_stream()), {x});
}

} // namespace

void bind_argmax(nb::module_& m) {
  m.def("argmax", &argmax, "x"_a);
}

} // namespace mlxinfer::cpu
