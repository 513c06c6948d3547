#include <algorithm>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include "blocks/run.h"

namespace mlxinfer::cpu {
namespace {

// Goes up whenever instructions change: Python makes none for a module of another version.
constexpr int kInstructionsVersion = 2;

// One of Python's objects as an instruction.
template <typename... Ts>
void append(std::vector<std::variant<Ts...>>& to, nb::handle from) {
  const bool known = ([&] {
    const bool is = nb::isinstance<Ts>(from);
    if (is) {
      to.push_back(nb::cast<const Ts&>(from));
    }
    return is;
  }() || ...);
  if (!known) {
    refuse("blocks", "an instruction is of no known type.");
  }
}

using MaybeArray = std::optional<mx::array>;
using MaybeNorm = std::optional<Norm>;
using MaybeView = std::optional<View>;

// A pool of Python's: a function of the arrays of `next` and the number of the wave.
class PythonPool : public ExpertPool {
 public:
  explicit PythonPool(nb::object next) : next_(std::move(next)) {}
  PythonPool(const PythonPool&) = delete;
  PythonPool& operator=(const PythonPool&) = delete;

  ~PythonPool() override { // on any thread
    if (Py_IsInitialized()) {
      nb::gil_scoped_acquire lock;
      next_.reset();
    } else {
      next_.release();
    }
  }

  bool next(std::span<const int32_t> chosen, std::span<const int32_t> expected, int64_t wave, std::span<int32_t> slots) override {
    nb::gil_scoped_acquire lock;
    try {
      return nb::cast<bool>(next_(numpy(chosen), numpy(expected), wave, numpy(slots)));
    } catch (...) { // the function reports its own errors
      std::fill(slots.begin(), slots.end(), -1);
      return false;
    }
  }

 private:
  template <typename T>
  static nb::object numpy(std::span<T> a) {
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(a.data(), {a.size()}, nb::handle()).cast(nb::rv_policy::reference);
  }

  nb::object next_;
};

void bind_parts(nb::module_& m) {
  nb::class_<View>(m, "View").def(
      "__init__", [](View* v, int buffer, int64_t width, int64_t first, int64_t count, int64_t each, int kind) {
        new (v) View{buffer, width, first, count, each, static_cast<Kind>(kind)};
      });
  nb::class_<Projection>(m, "Projection").def("__init__", [](Projection* p, const mx::array& data, const Layout& layout, int precision, MaybeArray bias) {
    new (p) Projection{data, layout, static_cast<Precision>(precision), std::move(bias)};
  }, "data"_a, "layout"_a, "precision"_a, "bias"_a.none());
  nb::class_<Norm>(m, "Norm").def("__init__", [](Norm* n, const mx::array& weight, float eps, bool centring) { new (n) Norm{weight, eps, centring}; });
}

void bind_instructions(nb::module_& m) {
  nb::class_<Multiply>(m, "Multiply")
      .def("__init__", [](Multiply* i, View x, View y, Projection p, MaybeNorm norm, MaybeView onto, MaybeView experts, int gate) {
        new (i) Multiply{x, y, std::move(p), std::move(norm), onto, experts, gate == 0 ? std::nullopt : std::optional(static_cast<Gate>(gate - 1))};
      }, "x"_a, "y"_a, "projection"_a, "norm"_a.none(), "onto"_a.none(), "experts"_a.none(), "gate"_a);
  nb::class_<NormView>(m, "NormView").def("__init__", [](NormView* i, View x, View y, Norm norm, MaybeView onto) {
    new (i) NormView{x, y, std::move(norm), onto};
  }, "x"_a, "y"_a, "norm"_a, "onto"_a.none());
  nb::class_<Attend>(m, "Attend")
      .def("__init__", [](Attend* i, View q, MaybeView turned, MaybeView k, MaybeView v, View y, std::tuple<int64_t, int64_t, int64_t, int64_t> numbers,
                          MaybeNorm q_norm, MaybeNorm k_norm, MaybeNorm v_norm, MaybeArray gain, MaybeArray sinks, float scale, float cap) {
        const auto [step, turned_step, still, source] = numbers;
        new (i) Attend{q, turned, k, v, y, step, turned_step, still, source, std::move(q_norm), std::move(k_norm), std::move(v_norm), std::move(gain),
                       std::move(sinks), scale, cap};
      }, "q"_a, "turned"_a.none(), "k"_a.none(), "v"_a.none(), "y"_a, "numbers"_a, "q_norm"_a.none(), "k_norm"_a.none(), "v_norm"_a.none(),
         "gain"_a.none(), "sinks"_a.none(), "scale"_a, "softcap"_a);
  nb::class_<ChooseExperts>(m, "ChooseExperts")
      .def("__init__", [](ChooseExperts* i, View logits, View experts, View shares, MaybeArray bias, MaybeArray gains, int scores, bool normalized,
                          std::tuple<float, float, float> numbers, std::tuple<int64_t, int64_t, int64_t> groups) {
        const auto [least, added, scale] = numbers;
        const auto [count, kept, ranked] = groups;
        const Route route{static_cast<Scores>(scores), logits.count, experts.each, normalized, least, added, scale, count, kept, ranked};
        new (i) ChooseExperts{logits, experts, shares, route, std::move(bias), std::move(gains)};
      }, "logits"_a, "experts"_a, "shares"_a, "bias"_a.none(), "gains"_a.none(), "scores"_a, "normalized"_a, "numbers"_a, "groups"_a);
  nb::class_<AddRows>(m, "AddRows").def("__init__", [](AddRows* i, View x, View y, MaybeView shares, MaybeView gate, MaybeView onto, float factor) {
    new (i) AddRows{x, y, shares, gate, onto, factor};
  }, "x"_a, "y"_a, "shares"_a.none(), "gate"_a.none(), "onto"_a.none(), "factor"_a);
  nb::class_<GateView>(m, "GateView")
      .def("__init__", [](GateView* i, View x, View gate, View y, int unit, float alpha, float limit, int64_t parts, int64_t step, MaybeView experts) {
        new (i) GateView{x, gate, y, static_cast<Unit>(unit), alpha, limit, parts, step, experts};
      }, "x"_a, "gate"_a, "y"_a, "unit"_a, "alpha"_a, "limit"_a, "parts"_a, "step"_a, "experts"_a.none() = nb::none());
  nb::class_<ExpertWaves>(m, "ExpertWaves")
      .def("__init__", [](ExpertWaves* i, View experts, View slots, MaybeView expected, int64_t count, nb::object next) {
        new (i) ExpertWaves{experts, slots, expected, count, std::make_shared<PythonPool>(std::move(next))};
      }, "experts"_a, "slots"_a, "expected"_a.none(), "count"_a, "next"_a);
}

void bind_recurrent(nb::module_& m) {
  using Five = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
  nb::class_<Delta>(m, "Delta").def(
      "__init__", [](Delta* i, View qkv, View beta, View rate, View y, Five sizes, mx::array convolution, mx::array decay, mx::array bias) {
        const auto [key_heads, value_heads, key_dim, value_dim, taps] = sizes;
        new (i) Delta{qkv, beta, rate, y, key_heads, value_heads, key_dim, value_dim, taps, convolution, decay, bias};
      });
  nb::class_<Mamba>(m, "Mamba").def(
      "__init__", [](Mamba* i, View mixed, View steps, View y, Five sizes, mx::array convolution, MaybeArray bias, mx::array decay, mx::array skip,
                     mx::array step_bias, std::pair<float, float> limits) {
        const auto [heads, dim, size, groups, taps] = sizes;
        new (i) Mamba{mixed, steps, y, heads, dim, size, groups, taps, convolution, bias, decay, skip, step_bias, limits.first, limits.second};
      }, "mixed"_a, "steps"_a, "y"_a, "sizes"_a, "convolution"_a, "bias"_a.none(), "decay"_a, "skip"_a, "step_bias"_a, "limits"_a);
  nb::class_<ShortConvolution>(m, "ShortConvolution")
      .def("__init__", [](ShortConvolution* i, View before, View after, View x, View y, int64_t taps, mx::array convolution, MaybeArray bias) {
        new (i) ShortConvolution{before, after, x, y, taps, convolution, bias};
      }, "before"_a, "after"_a, "x"_a, "y"_a, "taps"_a, "convolution"_a, "bias"_a.none());
  nb::class_<GatedNorm>(m, "GatedNorm")
      .def("__init__", [](GatedNorm* i, View x, View gate, View y, MaybeArray weight, float eps, bool normed, bool first, bool silu, int64_t groups) {
        new (i) GatedNorm{x, gate, y, weight, eps, normed, first, silu, groups};
      }, "x"_a, "gate"_a, "y"_a, "weight"_a.none(), "eps"_a, "normed"_a, "first"_a, "silu"_a, "groups"_a);
  nb::class_<Stretches>(m, "Stretches");
  m.def("stretches", [](const std::vector<std::pair<int64_t, int64_t>>& rows) {
    auto found = std::make_shared<Stretches>();
    for (const auto& [start, count] : rows) {
      if (start != found->rows || count < 1) {
        refuse("stretches", "sequences must have rows, one after another.");
      }
      found->all.push_back({start, count});
      found->rows += count;
    }
    return found;
  }, "rows"_a);
}

} // namespace

void bind_blocks(nb::module_& m) {
  bind_parts(m);
  bind_instructions(m);
  bind_recurrent(m);
  nb::class_<Blocks>(m, "Blocks");
  m.attr("instructions_version") = kInstructionsVersion;
  m.def("blocks", [](const nb::list& all, int64_t hidden, int64_t given, mx::Dtype dtype) {
    std::vector<Instruction> instructions;
    for (nb::handle each : all) {
      append(instructions, each);
    }
    return std::make_shared<Blocks>(std::move(instructions), hidden, given, dtype);
  }, "instructions"_a, "hidden"_a, "given"_a, "dtype"_a);
  m.def("run_blocks", [](const mx::array& x, std::shared_ptr<Blocks> blocks, std::vector<Arrays> sealed, std::vector<Arrays> open, std::vector<Arrays> first,
                         std::vector<std::pair<int, int>> bits, std::vector<std::shared_ptr<AttentionPlan>> plans,
                         std::vector<std::shared_ptr<Rotation>> rotations, Arrays states, std::shared_ptr<Stretches> stretches,
                         std::optional<mx::array> given) {
    return run_blocks(x, std::move(blocks), {std::move(sealed), std::move(open), std::move(first), std::move(bits), std::move(plans), std::move(rotations),
                                             std::move(states), std::move(stretches), std::move(given)});
  }, "x"_a, "blocks"_a, "sealed"_a, "open"_a, "first"_a, "bits"_a, "plans"_a, "rotations"_a, "states"_a, "stretches"_a.none(), "given"_a.none());
}

} // namespace mlxinfer::cpu
