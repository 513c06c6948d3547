// The operations on packed matrices as MLX sees them: packing, products, single rows.

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>

#include "matmul/gguf.h"
#include "matmul/layout.h"
#include "matmul/multiply.h"
#include "matmul/pack.h"
#include "matmul/rows.h"
#include "op/bindings.h"
#include "op/op.h"
#include "threads/pool.h"

#include "mlx/ops.h"

namespace mlxinfer::cpu {
namespace {

// E4M3 floats with scales that are floats too, in groups of any number of blocks.
constexpr const char* kFloat8 = "fp8";

Code code_of(int bits, int group, const std::string& mode) {
  auto is = [&](const char* name, int b, int g) { return mode == name && bits == b && group == g; };
  if (mode == "affine" && (group == 32 || group == 64 || group == 128)) {
    if (bits >= 1 && bits <= 6) {
      return static_cast<Code>(static_cast<int>(Code::affine1) + bits - 1);
    }
    if (bits == 8) {
      return Code::affine8;
    }
  }
  if (is("mxfp4", 4, 32) || is("nvfp4", 4, 16) || is("mxfp8", 8, 32)) {
    return mode == "mxfp4" ? Code::mxfp4 : mode == "nvfp4" ? Code::nvfp4 : Code::mxfp8;
  }
  if (mode == kFloat8 && bits == 8 && group > 0 && group % kBlockColumns == 0) {
    return Code::mxfp8;
  }
  refuse("pack", "no such format: mode " + mode + ", " + std::to_string(bits) + " bits, groups of " + std::to_string(group) + ".");
}

const void* evaluated(mx::array& a) {
  a = mx::contiguous(a, false, cpu_stream());
  a.eval();
  return a.data<char>();
}

Scale scale_of(const mx::array& scales) {
  switch (float_of(scales)) {
    case Float::f32:
      return Scale::f32;
    case Float::bf16:
      return Scale::bf16;
    default:
      return Scale::f16;
  }
}

// The narrowest scales that are equal to those given.
Scale lossless_scale(Scale given, std::initializer_list<const mx::array*> arrays) {
  auto all = [&](auto holds) {
    for (const mx::array* a : arrays) {
      if (!holds(*a)) {
        return false;
      }
    }
    return true;
  };
  if (given == Scale::bf16 && all([](auto& a) { return bfloats_fit_half(a.template data<uint16_t>(), a.size()); })) {
    return Scale::f16;
  }
  for (Scale narrower : {Scale::f16, Scale::bf16}) {
    if (given == Scale::f32 && all([=](auto& a) { return fits(a.template data<float>(), a.size(), narrower); })) {
      return narrower;
    }
  }
  return given;
}

struct Packed {
  mx::array data;
  Layout layout;
};

mx::array packed_array(const Layout& layout, mx::Shape shape) {
  shape.push_back(static_cast<int>(layout.panels()));
  shape.push_back(static_cast<int>(layout.panel_bytes()));
  return aligned_array(shape, mx::uint8);
}

Packed packed(const Layout& layout, Scale source_scale, const Source& source, const mx::Shape& leading) {
  int64_t count = 1;
  for (auto size : leading) {
    count *= size;
  }
  mx::array data = packed_array(layout, leading);
  pack(layout, source_scale, count, source, data.data<uint8_t>());
  return {data, layout};
}

mx::Shape leading_of(const mx::array& a) {
  return mx::Shape(a.shape().begin(), a.shape().end() - 2);
}

Packed pack_quantized(mx::array weight, mx::array scales, std::optional<mx::array> biases, int group, int bits, const std::string& mode) {
  const char* op = "pack";
  const Code code = code_of(bits, group, mode);
  const bool affine = mode == "affine", float_scales = affine || mode == kFloat8;
  if (weight.ndim() < 2 || weight.dtype() != mx::uint32 || weight.shape(-1) == 0) {
    refuse(op, "weight must be uint32 [..., n, k * bits / 32], not " + dtype_text(weight) + " " + shape_text(weight.shape()) + ".");
  }
  const int64_t n = weight.shape(-2), k = static_cast<int64_t>(weight.shape(-1)) * 32 / bits;
  mx::Shape wanted = leading_of(weight);
  wanted.push_back(static_cast<int>(n));
  wanted.push_back(static_cast<int>(k / group));
  if (k % group != 0 || k % kBlockColumns != 0 || k * bits != static_cast<int64_t>(weight.shape(-1)) * 32 || scales.shape() != wanted ||
      affine != biases.has_value() || (biases && biases->shape() != wanted)) {
    refuse(op, "weight " + shape_text(weight.shape()) + " and scales " + shape_text(scales.shape()) + (biases ? "" : " without biases") +
               " do not make " + std::to_string(bits) + "-bit " + mode + " groups of " + std::to_string(group) + ".");
  }
  if (float_scales ? !is_floating(scales) || (affine && biases->dtype() != scales.dtype()) : scales.dtype() != mx::uint8) {
    refuse(op, "scales must be " + std::string(affine ? "floats of the dtype of biases" : float_scales ? "floats" : "uint8") + ", not " +
               dtype_text(scales) + ".");
  }
  nb::gil_scoped_release release;
  Source source{evaluated(weight), evaluated(scales), biases ? evaluated(*biases) : nullptr};
  const Scale given = float_scales ? scale_of(scales) : code == Code::nvfp4 ? Scale::e4m3 : Scale::e8m0;
  const Scale kept = affine ? lossless_scale(given, {&scales, &*biases}) : float_scales ? lossless_scale(given, {&scales}) : given;
  return packed({code, kept, group, 0, n, k}, given, source, leading_of(weight));
}

Packed pack_plain(mx::array weight) {
  if (weight.ndim() < 2 || !is_floating(weight) || weight.shape(-1) == 0) {
    refuse("pack", "weight must be [..., n, k > 0] of float32, bfloat16 or float16, not " + dtype_text(weight) + " " + shape_text(weight.shape()) + ".");
  }
  nb::gil_scoped_release release;
  Source source{evaluated(weight), nullptr, nullptr};
  const Code code = static_cast<Code>(static_cast<int>(Code::f32) + static_cast<int>(float_of(weight)));
  Layout layout{code, Scale::none, kBlockColumns, 0, weight.shape(-2), weight.shape(-1)};
  return packed(layout, Scale::none, source, leading_of(weight));
}

// Room for a matrix `[..., n, k]` of blocks of this type.
Packed empty_gguf(const std::string& name, const std::vector<int>& shape) {
  const GgufType* type = find_gguf_type(name);
  if (type == nullptr || shape.size() < 2 || shape.back() % type->columns != 0) {
    refuse("pack", "there are no matrices " + shape_text(mx::Shape(shape.begin(), shape.end())) + " of " + name + " blocks.");
  }
  const Layout layout = type->layout(shape[shape.size() - 2], shape.back());
  mx::array data = packed_array(layout, mx::Shape(shape.begin(), shape.end() - 2));
  if (layout.n % kPanelRows != 0) {
    std::memset(data.data<uint8_t>(), 0, data.nbytes());
  }
  return {data, layout};
}

using GgufRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Writes rows from `first` on into what `empty_gguf` gave; false where a scale is infinite or NaN.
bool fill_gguf(mx::array data, const Layout& layout, const std::string& name, int64_t first, const GgufRows& rows) {
  const GgufType* type = find_gguf_type(name);
  const int64_t panel = layout.panels() * layout.panel_bytes(), count = static_cast<int64_t>(rows.shape(0));
  const int64_t room = panel == 0 ? 0 : static_cast<int64_t>(data.size()) / panel * layout.n;
  if (type == nullptr || static_cast<int64_t>(rows.shape(1)) != layout.k / type->columns * type->bytes || first < 0 || first > room - count) {
    refuse("pack", std::to_string(count) + " rows of " + std::to_string(rows.shape(1)) + " bytes do not fit there as " + name + " blocks.");
  }
  nb::gil_scoped_release release;
  return pack_gguf(*type, layout, first, count, rows.data(), data.data<uint8_t>());
}

// The layout with these `Layout.numbers`, which a file of the same kPackedVersion has kept.
Layout layout_of(const std::vector<int64_t>& numbers) {
  const bool known = numbers.size() == 6 && numbers[0] >= 0 && numbers[0] < kCodes && numbers[1] >= 0 && numbers[1] <= static_cast<int>(Scale::nested);
  constexpr int64_t most = std::numeric_limits<int>::max();
  if (!known || numbers[2] < 1 || numbers[2] > most || numbers[3] < 0 || numbers[3] > most || numbers[4] < 1 || numbers[4] > most || numbers[5] < 1 ||
      numbers[5] > most) {
    refuse("pack", "these numbers are not those of a layout.");
  }
  return {static_cast<Code>(numbers[0]), static_cast<Scale>(numbers[1]), static_cast<int>(numbers[2]), static_cast<int>(numbers[3]), numbers[4], numbers[5]};
}

// Throws unless `data` is what `pack` made of this layout.
void check_data(const char* op, const mx::array& data, const Layout& layout) {
  if (data.dtype() != mx::uint8 || data.ndim() < 2 || data.shape(-2) != layout.panels() || data.shape(-1) != layout.panel_bytes()) {
    refuse(op, "data " + shape_text(data.shape()) + " is not packed in this layout.");
  }
}

struct Options {
  Precision precision;
  bool norm, bias, residual, experts;
  float eps;
  std::optional<Gate> gate;
};

class PackedMatmul : public Operation {
 public:
  PackedMatmul(mx::Stream stream, const Layout& layout, const Options& options) : Operation(stream), layout_(layout), options_(options) {}

  // Inputs: x, data, then norm, bias, residual and experts as far as there are any.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    allocate(y);
    if (y.size() == 0) {
      return;
    }
    auto next = inputs.begin() + 2;
    auto optional = [&](bool there) -> const mx::array* { return there ? &*next++ : nullptr; };
    auto elements = [&](const mx::array* a) { return a ? elements_of(*a, encoder()) : nullptr; };
    Product p{};
    p.layout = layout_;
    p.weights = static_cast<const uint8_t*>(elements_of(inputs[1], encoder()));
    p.precision = options_.precision;
    p.dtype = float_of(inputs[0]);
    p.x = rows_of(inputs[0], encoder());
    p.rows = static_cast<int64_t>(y.size()) / y.shape(-1);
    p.x_repeats = p.x.count == 0 ? 1 : p.rows / p.x.count;
    p.norm = elements(optional(options_.norm));
    p.eps = options_.eps;
    p.bias = elements(optional(options_.bias));
    const mx::array* residual = optional(options_.residual);
    p.residual = residual ? rows_of(*residual, encoder()) : Rows{};
    p.experts = static_cast<const int32_t*>(elements(optional(options_.experts)));
    p.expert_count = static_cast<int64_t>(inputs[1].size()) / (layout_.panels() * layout_.panel_bytes());
    p.gate = options_.gate;
    p.y = y.data<char>();
    const int64_t row_bytes = static_cast<int64_t>(y.nbytes()) / p.rows;
    encoder().dispatch([p, row_bytes] {
      for (int64_t i = 0; p.experts != nullptr && i < p.rows; ++i) {
        if (p.experts[i] < 0) {
          std::memset(static_cast<char*>(p.y) + i * row_bytes, 0, static_cast<size_t>(row_bytes));
        }
      }
      multiply(p);
    });
  }

  const char* name() const override {
    return "mlxinfer.packed_matmul";
  }

 private:
  const Layout layout_;
  const Options options_;
};

// `precision`: a Precision. `gate`: 0 none, otherwise 1 + Gate.
mx::array packed_matmul(
    const mx::array& x,
    const mx::array& data,
    const Layout& layout,
    int precision,
    const std::optional<mx::array>& bias,
    const std::optional<mx::array>& residual,
    const std::optional<mx::array>& norm,
    float eps,
    int gate,
    const std::optional<mx::array>& experts) {
  const char* op = "packed_matmul";
  check_data(op, data, layout);
  if (x.ndim() == 0 || x.shape(-1) != layout.k || !is_floating(x)) {
    refuse(op, "x must be floats [..., " + std::to_string(layout.k) + "], not " + dtype_text(x) + " " + shape_text(x.shape()) + ".");
  }
  const bool many = data.ndim() > 2;
  if (many != experts.has_value()) {
    refuse(op, many ? "these weights are those of several experts: `experts` must choose." : "there is one matrix only: `experts` cannot choose.");
  }
  if (gate != 0 && (layout.n % (2 * kPanelRows) != 0 || residual)) {
    refuse(op, "a gate needs halves of a multiple of 16 columns, and no residual.");
  }
  const int width = static_cast<int>(gate != 0 ? layout.n / 2 : layout.n);
  mx::Shape shape = experts ? experts->shape() : mx::Shape(x.shape().begin(), x.shape().end() - 1);
  shape.push_back(width);
  std::vector<mx::array> inputs{x, data};
  auto take = [&](const char* what, const std::optional<mx::array>& a, const mx::Shape& wanted) {
    if (a && (a->dtype() != x.dtype() || a->shape() != wanted)) {
      refuse(op, std::string(what) + " must be " + dtype_text(x) + " " + shape_text(wanted) + ", not " + dtype_text(*a) + " " + shape_text(a->shape()) + ".");
    }
    if (a) {
      inputs.push_back(*a);
    }
  };
  take("norm", norm, {static_cast<int>(layout.k)});
  mx::Shape bias_shape = leading_of(data);
  bias_shape.push_back(static_cast<int>(layout.n));
  take("bias", bias, bias_shape);
  take("residual", residual, shape);
  if (experts) {
    const size_t rows = x.size() / static_cast<size_t>(std::max<int64_t>(layout.k, 1));
    if (data.ndim() != 3 || !mx::issubdtype(experts->dtype(), mx::integer) || (rows == 0 ? experts->size() != 0 : experts->size() % rows != 0) ||
        (data.size() == 0 && layout.n > 0 && experts->size() != 0)) {
      refuse(op, "experts " + shape_text(experts->shape()) + " must be integers, one or more for each of the " + std::to_string(rows) + " rows of x.");
    }
    inputs.push_back(mx::astype(*experts, mx::int32, cpu_stream()));
  }
  Options options{static_cast<Precision>(precision), norm.has_value(), bias.has_value(), residual.has_value(), experts.has_value(), eps, std::nullopt};
  if (gate != 0) {
    options.gate = static_cast<Gate>(gate - 1);
  }
  return mx::array(shape, x.dtype(), std::make_shared<PackedMatmul>(cpu_stream(), layout, options), std::move(inputs));
}

class PackedRows : public Operation {
 public:
  PackedRows(mx::Stream stream, const Layout& layout) : Operation(stream), layout_(layout) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    auto* indices = static_cast<const int32_t*>(elements_of(inputs[0], encoder()));
    auto* weights = static_cast<const uint8_t*>(elements_of(inputs[1], encoder()));
    encoder().dispatch([l = layout_, indices, weights, count = inputs[0].size(), y = outputs[0].data<char>(), to = float_of(outputs[0])] {
      parallel_for(count, 16, [&](size_t begin, size_t end) {
        std::vector<float> row(static_cast<size_t>(l.k));
        for (size_t i = begin; i < end; ++i) {
          read_row(l, weights, std::clamp<int64_t>(indices[i], 0, l.n - 1), row.data());
          const int64_t bytes = item_bytes(to);
          finish_kernels().plain[static_cast<int>(to)](row.data(), static_cast<int>(l.k), nullptr, nullptr, y + static_cast<int64_t>(i) * l.k * bytes);
        }
      });
    });
  }

  const char* name() const override {
    return "mlxinfer.packed_rows";
  }

 private:
  const Layout layout_;
};

mx::array packed_rows(const mx::array& indices, const mx::array& data, const Layout& layout, mx::Dtype dtype) {
  const char* op = "packed_rows";
  check_data(op, data, layout);
  if (data.ndim() != 2 || layout.n == 0 || !mx::issubdtype(indices.dtype(), mx::integer)) {
    refuse(op, "indices must be integers into the rows of one matrix.");
  }
  if (dtype != mx::float32 && dtype != mx::bfloat16 && dtype != mx::float16) {
    refuse(op, "rows can be float32, bfloat16 or float16.");
  }
  mx::Shape shape = indices.shape();
  shape.push_back(static_cast<int>(layout.k));
  return mx::array(shape, dtype, std::make_shared<PackedRows>(cpu_stream(), layout), {mx::astype(indices, mx::int32, cpu_stream()), data});
}

} // namespace

void bind_packed(nb::module_& m) {
  nb::class_<Layout>(m, "Layout")
      .def_ro("n", &Layout::n)
      .def_ro("k", &Layout::k)
      .def_prop_ro("bits", &Layout::bits)
      .def_ro("group_size", &Layout::group)
      .def_prop_ro("has_integers", &Layout::has_integers)
      .def_prop_ro("numbers", [](const Layout& l) {
        return std::vector<int64_t>{static_cast<int>(l.code), static_cast<int>(l.scale), l.group, l.zero, l.n, l.k};
      });
  m.def("layout_of", &layout_of, "numbers"_a);
  m.def("weight_array", [](const std::vector<int>& shape, mx::Dtype dtype) {
    return aligned_array(mx::Shape(shape.begin(), shape.end()), dtype);
  }, "shape"_a, "dtype"_a);
  m.def("pack_quantized", [](const mx::array& w, const mx::array& s, const std::optional<mx::array>& b, int group, int bits, const std::string& mode) {
    Packed p = pack_quantized(w, s, b, group, bits, mode);
    return nb::make_tuple(p.data, p.layout);
  }, "weight"_a, "scales"_a, "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a);
  m.attr("packs_float8") = true;
  m.def("pack_plain", [](const mx::array& w) {
    Packed p = pack_plain(w);
    return nb::make_tuple(p.data, p.layout);
  }, "weight"_a);
  m.def("gguf_types", [] {
    nb::dict formats;
    for (const GgufType& type : gguf_types()) {
      formats[nb::str(type.name.data(), type.name.size())] = nb::make_tuple(code_bits(type.code), type.group);
    }
    return formats;
  });
  m.def("empty_gguf", [](const std::string& kind, const std::vector<int>& shape) {
    Packed p = empty_gguf(kind, shape);
    return nb::make_tuple(p.data, p.layout);
  }, "kind"_a, "shape"_a);
  m.def("fill_gguf", &fill_gguf, "data"_a, "layout"_a, "kind"_a, "first"_a, "rows"_a);
  m.def("packed_matmul", &packed_matmul, "x"_a, "data"_a, "layout"_a, "precision"_a, "bias"_a.none(), "residual"_a.none(), "norm"_a.none(), "eps"_a,
        "gate"_a, "experts"_a.none());
  m.def("packed_rows", &packed_rows, "indices"_a, "data"_a, "layout"_a, "dtype"_a);
}

} // namespace mlxinfer::cpu
