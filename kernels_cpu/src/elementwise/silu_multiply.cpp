#include "elementwise/silu_multiply.h"

#include <algorithm>

#include "op/bindings.h"
#include "op/op.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kPieceElements = 16384; // some 10 us of work

class SiluMultiply : public Operation {
 public:
  using Operation::Operation;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    if (outputs[0].size() == 0) {
      return;
    }
    auto gate = rows_of(inputs[0], encoder()), up = rows_of(inputs[1], encoder());
    auto kernel = silu_multiply_kernels().row[static_cast<int>(float_of(inputs[0]))];
    encoder().dispatch([gate, up, kernel, out = outputs[0].data<char>(), size = outputs[0].itemsize()] {
      auto rows_per_piece = std::max<int64_t>(1, kPieceElements / gate.size);
      parallel_for(gate.count, rows_per_piece, [&](size_t begin, size_t end) {
        for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
          auto at = [&](const Rows& rows) { return static_cast<const char*>(rows.data) + i * rows.stride * static_cast<int64_t>(size); };
          kernel(at(gate), at(up), out + i * gate.size * static_cast<int64_t>(size), gate.size);
        }
      });
    });
  }

  const char* name() const override {
    return "mlxinfer.silu_multiply";
  }
};

mx::array silu_multiply(const mx::array& gate, const mx::array& up) {
  const char* op = "silu_multiply";
  if (gate.shape() != up.shape() || gate.ndim() == 0) {
    refuse(op, "gate " + shape_text(gate.shape()) + " and up " + shape_text(up.shape()) + " must have one shape of at least one axis.");
  }
  if (!is_floating(gate) || gate.dtype() != up.dtype()) {
    refuse(op, "gate (" + dtype_text(gate) + ") and up (" + dtype_text(up) + ") must both be float32, bfloat16 or float16.");
  }
  return mx::array(gate.shape(), gate.dtype(), std::make_shared<SiluMultiply>(cpu_stream()), {gate, up});
}

} // namespace

void bind_silu_multiply(nb::module_& m) {
  m.def("silu_multiply", &silu_multiply, "gate"_a, "up"_a);
}

} // namespace mlxinfer::cpu
