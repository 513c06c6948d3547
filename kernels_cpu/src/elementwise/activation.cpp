#include "elementwise/activation.h"

#include <algorithm>

#include "op/bindings.h"
#include "op/op.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kPieceElements = 16384; // some 10 us of work

class Activate : public Operation {
 public:
  Activate(mx::Stream stream, int kind) : Operation(stream), kind_(kind) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    const auto size = static_cast<int64_t>(outputs[0].size()), item = item_bytes(float_of(inputs[0]));
    if (size == 0) {
      return;
    }
    auto* x = static_cast<const char*>(elements_of(inputs[0], encoder()));
    auto kernel = activation_functions().apply[static_cast<int>(float_of(inputs[0]))][kind_];
    encoder().dispatch([=, out = outputs[0].data<char>()] {
      parallel_for(static_cast<size_t>((size + kPieceElements - 1) / kPieceElements), 1, [&](size_t begin, size_t end) {
        const int64_t first = static_cast<int64_t>(begin) * kPieceElements, last = std::min(static_cast<int64_t>(end) * kPieceElements, size);
        kernel(x + first * item, out + first * item, last - first);
      });
    });
  }

  const char* name() const override {
    return "mlxinfer.activate";
  }

 private:
  const int kind_;
};

// `kind`: the order of ActivationFunctions.
mx::array activate(const mx::array& x, int kind) {
  if (!is_floating(x) || kind < 0 || kind >= kActivations) {
    refuse("activate", "x must be floats, not " + dtype_text(x) + ", and the kind from 0 to " + std::to_string(kActivations - 1) + ".");
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<Activate>(cpu_stream(), kind), {x});
}

} // namespace

void bind_activation(nb::module_& m) {
  m.def("activate", &activate, "x"_a, "kind"_a);
}

} // namespace mlxinfer::cpu
