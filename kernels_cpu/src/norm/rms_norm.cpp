#include "norm/rms_norm.h"

#include <algorithm>

#include "norm/norm_rows.h"
#include "op/bindings.h"
#include "threads/pool.h"

#include "mlx/ops.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kPieceElements = 16384; // some 5 us of work

// Inputs: x, then weight and what is added as far as there are any: the rows `onto`, or a bias for all rows where the norm is `centring`.
class RmsNorm : public Operation {
 public:
  RmsNorm(mx::Stream stream, float eps, bool weighted, bool added, bool centring)
      : Operation(stream), eps_(eps), weighted_(weighted), added_(added), centring_(centring) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    if (outputs[0].size() == 0) {
      return;
    }
    NormRows rows{};
    rows.x = rows_of(inputs[0], encoder());
    rows.weight = weighted_ ? elements_of(inputs[1], encoder()) : nullptr;
    rows.eps = eps_;
    rows.centring = centring_;
    if (added_) {
      rows.onto = centring_ ? Rows{elements_of(inputs.back(), encoder()), rows.x.count, rows.x.size, 0} : rows_of(inputs.back(), encoder());
    }
    rows.out = outputs[0].data<char>();
    rows.dtype = float_of(inputs[0]);
    encoder().dispatch([rows] { rows.run(); });
  }

  const char* name() const override {
    return centring_ ? "mlxinfer.layer_norm" : "mlxinfer.rms_norm";
  }

 private:
  const float eps_;
  const bool weighted_, added_, centring_;
};

// Adds a vector with a number for each column of x.
void take_columns(const char* op, const char* what, const mx::array& x, const std::optional<mx::array>& vector, std::vector<mx::array>& inputs) {
  if (!vector) {
    return;
  }
  if (vector->shape() != mx::Shape{x.shape(-1)}) {
    refuse(op, std::string(what) + " " + shape_text(vector->shape()) + " must have the " + std::to_string(x.shape(-1)) + " columns of x.");
  }
  inputs.push_back(mx::astype(*vector, x.dtype(), cpu_stream()));
}

mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight, const std::optional<mx::array>& bias, float eps) {
  const char* op = "layer_norm";
  if (x.ndim() == 0 || !is_floating(x)) {
    refuse(op, "x must be floats [..., n], not " + dtype_text(x) + " " + shape_text(x.shape()) + ".");
  }
  std::vector<mx::array> inputs{x};
  take_columns(op, "weight", x, weight, inputs);
  take_columns(op, "bias", x, bias, inputs);
  return mx::array(
      x.shape(), x.dtype(), std::make_shared<RmsNorm>(cpu_stream(), eps, weight.has_value(), bias.has_value(), true), std::move(inputs));
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, const std::optional<mx::array>& onto) {
  const char* op = "rms_norm";
  if (x.ndim() == 0 || !is_floating(x)) {
    refuse(op, "x must be floats [..., n], not " + dtype_text(x) + " " + shape_text(x.shape()) + ".");
  }
  std::vector<mx::array> inputs{x};
  take_columns(op, "weight", x, weight, inputs);
  if (onto) {
    if (onto->shape() != x.shape() || onto->dtype() != x.dtype()) {
      refuse(op, "onto must be " + dtype_text(x) + " " + shape_text(x.shape()) + " like x, not " + dtype_text(*onto) + " " + shape_text(onto->shape()) + ".");
    }
    inputs.push_back(*onto);
  }
  return mx::array(
      x.shape(), x.dtype(), std::make_shared<RmsNorm>(cpu_stream(), eps, weight.has_value(), onto.has_value(), false), std::move(inputs));
}

} // namespace

void NormRows::run() const {
  const int64_t item = item_bytes(dtype);
  auto kernel = (centring ? rms_norm_kernels().centred : rms_norm_kernels().row)[static_cast<int>(dtype)];
  auto at = [item](const Rows& rows, int64_t i) -> const void* {
    return rows.data == nullptr ? nullptr : static_cast<const char*>(rows.data) + i * rows.stride * item;
  };
  parallel_for(static_cast<size_t>(x.count), static_cast<size_t>(std::max<int64_t>(1, kPieceElements / x.size)), [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      kernel(at(x, i), weight, eps, at(onto, i), static_cast<char*>(out) + i * (out_stride == 0 ? x.size : out_stride) * item, x.size);
    }
  });
}

void bind_rms_norm(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a, "onto"_a.none());
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a);
}

} // namespace mlxinfer::cpu
