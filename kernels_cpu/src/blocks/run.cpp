// Decoder blocks as one operation: a step of a small model has hundreds of products, and what MLX and Python do for each costs more
// than reading its weights.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <variant>

#include "attention/operands.h"
#include "blocks/block.h"
#include "norm/norm_rows.h"
#include "op/bindings.h"

namespace mlxinfer::cpu {
namespace {

constexpr const char* kName = "run_blocks";

using Work = std::variant<Product, AttentionWork, NormRows>;

void run(const Product& product) {
  multiply(product);
}
void run(const AttentionWork& attention) {
  attention.run();
}
void run(const NormRows& rows) {
  rows.run();
}

// Lays out all the work of a step. Every block reads the stream from and adds it to one buffer.
class Plan {
 public:
  Plan(const Blocks& blocks, int64_t rows, void* stream, mx::cpu::CommandEncoder& encoder)
      : dtype_(blocks.dtype), float_(dtype_ == mx::float32 ? Float::f32 : dtype_ == mx::bfloat16 ? Float::bf16 : Float::f16), rows_(rows),
        stream_{stream, rows, blocks.hidden, blocks.hidden}, encoder_(encoder) {
    int64_t projected = 0, answers = 0, inner = 0;
    for (const auto& b : blocks.blocks) {
      int64_t width = 0;
      for (const auto& p : b.qkv) {
        width += p.layout.n;
      }
      projected = std::max(projected, width);
      answers = std::max(answers, b.output.layout.k);
      inner = std::max(inner, b.down.layout.k);
    }
    projected_ = buffer(projected);
    answers_ = buffer(answers);
    inner_ = buffer(inner);
    part_ = buffer(blocks.hidden);
  }

  void add(const Block& b, AttentionWork attention) {
    std::vector<RowsOfHeads> pieces;
    char* place = projected_;
    for (const auto& p : b.qkv) {
      const Rows piece{place, rows_, p.layout.n, p.layout.n};
      add_product(p, stream_, b.before_attention, {}, place);
      pieces.push_back({piece, float_});
      place += rows_ * p.layout.n * item();
    }
    const int64_t heads = b.output.layout.k / attention.values.dim;
    split_heads(pieces, heads, attention);
    auto prepare = [&](Heads& h, const std::optional<Norm>& norm) {
      h.norm = norm ? norm->weight.data<char>() : nullptr;
      h.eps = norm ? norm->eps : 0.0f;
      h.rotation = attention.rotation.get();
    };
    prepare(attention.queries, b.query_norm);
    prepare(attention.new_keys, b.key_norm);
    attention.heads_per_kv = heads / attention.keys.kv_heads;
    attention.scale = b.scale;
    attention.softcap = b.softcap;
    attention.sinks = b.sinks ? b.sinks->data<float>() : nullptr;
    attention.out = answers_;
    attention.out_item_size = item();
    work_.push_back(std::move(attention));
    add_part(b.output, answers_, b.after_attention);

    add_product(b.gate_up, stream_, b.before_mlp, {}, inner_, b.gate);
    add_part(b.down, inner_, b.after_mlp);
  }

  std::vector<Work> take() {
    return std::move(work_);
  }

 private:
  int64_t item() const {
    return static_cast<int64_t>(mx::size_of(dtype_));
  }

  char* buffer(int64_t width) {
    mx::array a({static_cast<int>(rows_), static_cast<int>(width)}, dtype_, nullptr, {});
    allocate(a);
    char* data = a.data<char>();
    encoder_.add_temporary(std::move(a));
    return data;
  }

  // stream += after(x @ projection.T)
  void add_part(const Projection& p, const void* x, const std::optional<Norm>& after) {
    const Rows from{x, rows_, p.layout.k, p.layout.k};
    char* stream = const_cast<char*>(static_cast<const char*>(stream_.data));
    if (!after) {
      add_product(p, from, std::nullopt, stream_, stream);
      return;
    }
    add_product(p, from, std::nullopt, {}, part_);
    work_.push_back(NormRows{{part_, rows_, p.layout.n, p.layout.n}, after->weight.data<char>(), after->eps, stream_, stream, float_});
  }

  void add_product(
      const Projection& p, const Rows& x, const std::optional<Norm>& norm, const Rows& residual, void* y, std::optional<Gate> gate = std::nullopt) {
    Product product{};
    product.layout = p.layout;
    product.weights = p.data.data<uint8_t>();
    product.precision = p.precision;
    product.dtype = float_;
    product.x = x;
    product.rows = rows_;
    product.x_repeats = 1;
    product.norm = norm ? norm->weight.data<char>() : nullptr;
    product.eps = norm ? norm->eps : 0.0f;
    product.expert_count = 1;
    product.bias = p.bias ? p.bias->data<char>() : nullptr;
    product.residual = residual;
    product.gate = gate;
    product.y = y;
    work_.push_back(product);
  }

  const mx::Dtype dtype_;
  const Float float_;
  const int64_t rows_;
  const Rows stream_;
  mx::cpu::CommandEncoder& encoder_;
  char *projected_, *answers_, *inner_, *part_;
  std::vector<Work> work_;
};

// What a block's attention works on. The pages are no inputs of the operation, which would have to be followed through MLX's graph in
// each step: they have been computed before, and the open ones are written in place.
struct Pages {
  PageArrays arrays;
  std::shared_ptr<const AttentionPlan> plan;
  std::shared_ptr<const Rotation> rotation; // or null
};

// Input: x. Outputs: x, then for each block what becomes full, if any pages do.
class RunBlocks : public Operation {
 public:
  RunBlocks(mx::Stream stream, std::shared_ptr<const Blocks> blocks, std::vector<Pages> pages)
      : Operation(stream), blocks_(std::move(blocks)), pages_(std::make_shared<std::vector<Pages>>(std::move(pages))) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const auto& x = inputs[0];
    allocate(outputs[0]);
    void* stream = outputs[0].data<char>();
    Plan plan(*blocks_, x.shape(0), stream, encoder());
    auto next = outputs.begin() + 1;
    for (size_t i = 0; i < blocks_->blocks.size(); ++i) {
      const Pages& pages = (*pages_)[i];
      AttentionWork attention{};
      attention.plan = pages.plan;
      attention.rotation = pages.rotation;
      const mx::array* filled = nullptr;
      if (pages.plan->full_pages > 0) {
        filled = &*next;
        for (size_t left = pages.arrays.sealed.size() + pages.arrays.first.size(); left > 0; --left) {
          allocate(*next++);
        }
      }
      set_stores(pages.arrays, filled, encoder(), attention);
      plan.add(blocks_->blocks[i], std::move(attention));
    }
    if (x.size() > 0) {
      const void* from = elements_of(x, encoder());
      encoder().dispatch([blocks = blocks_, pages = pages_, work = plan.take(), from, stream, bytes = x.nbytes()] {
        std::copy_n(static_cast<const char*>(from), bytes, static_cast<char*>(stream));
        for (const auto& part : work) {
          std::visit([](const auto& w) { run(w); }, part);
        }
      });
    }
  }

  const char* name() const override {
    return "mlxinfer.run_blocks";
  }

 private:
  const std::shared_ptr<const Blocks> blocks_;
  const std::shared_ptr<const std::vector<Pages>> pages_;
};

void check_block(const Block& b, PageArrays& pages, const AttentionPlan& plan, const Rotation* rotation) {
  check_pages(kName, pages, plan);
  for (Arrays* arrays : {&pages.sealed, &pages.first, &pages.open}) {
    for (auto& a : *arrays) {
      if (!a.is_available()) { // MLX's thread may want the interpreter's lock before it comes to these
        nb::gil_scoped_release release;
        a.eval();
      }
      if (!a.flags().row_contiguous && a.size() > 0) {
        refuse(kName, "pages must be contiguous.");
      }
    }
  }
  const HeadSizes sizes = pages.sizes();
  std::vector<int64_t> widths;
  for (const auto& p : b.qkv) {
    widths.push_back(p.layout.n);
  }
  const int64_t heads = query_heads(widths, sizes);
  bool fits = heads > 0 && heads * sizes.value_dim == b.output.layout.k && (!b.sinks || static_cast<int64_t>(b.sinks->size()) == heads);
  for (const auto* norm : {&b.query_norm, &b.key_norm}) {
    fits = fits && (!*norm || static_cast<int64_t>((*norm)->weight.size()) == sizes.key_dim);
  }
  if (!fits) {
    refuse(kName, "the matrices of a block do not give queries, keys and values for pages " + shapes_text(pages.open) + ".");
  }
  if (rotation != nullptr && (rotation->rows != plan.rows || 2 * rotation->half > sizes.key_dim)) {
    refuse(kName, "the rotation must have the plan's rows and at most the heads' channels.");
  }
}

// `sealed`, `open`, `first` and `bits` are those of each block.
Arrays run_blocks(
    const mx::array& x,
    std::shared_ptr<Blocks> blocks,
    std::vector<Arrays> sealed,
    std::vector<Arrays> open,
    std::vector<Arrays> first,
    const std::vector<std::pair<int, int>>& bits,
    const std::vector<std::shared_ptr<AttentionPlan>>& plans,
    const std::vector<std::shared_ptr<Rotation>>& rotations) {
  const size_t count = blocks->blocks.size();
  if (sealed.size() != count || open.size() != count || first.size() != count || bits.size() != count || plans.size() != count || rotations.size() != count) {
    refuse(kName, "every block needs pages, a plan and a rotation.");
  }
  if (x.ndim() != 2 || x.shape(1) != blocks->hidden || x.dtype() != blocks->dtype) {
    refuse(kName, "x " + dtype_text(x) + " " + shape_text(x.shape()) + " must be [rows, " + std::to_string(blocks->hidden) + "] in the blocks' dtype.");
  }
  std::vector<mx::Shape> shapes{x.shape()};
  std::vector<mx::Dtype> dtypes{x.dtype()};
  std::vector<Pages> pages;
  for (size_t i = 0; i < count; ++i) {
    if (!plans[i] || plans[i]->rows != x.shape(0)) {
      refuse(kName, "the plan must have the rows of x.");
    }
    PageArrays arrays{std::move(sealed[i]), std::move(first[i]), std::move(open[i]), {bits[i].first, bits[i].second}};
    check_block(blocks->blocks[i], arrays, *plans[i], rotations[i].get());
    if (plans[i]->full_pages > 0) {
      for (const auto& kind : filled_kinds(arrays, *plans[i])) {
        shapes.push_back(kind.shape);
        dtypes.push_back(kind.dtype);
      }
    }
    pages.push_back({std::move(arrays), plans[i], rotations[i]});
  }
  auto operation = std::make_shared<RunBlocks>(cpu_stream(), std::move(blocks), std::move(pages));
  return mx::array::make_arrays(std::move(shapes), dtypes, operation, {x});
}

} // namespace

void bind_blocks(nb::module_& m) {
  nb::class_<Projection>(m, "Projection")
      .def("__init__", [](Projection* p, const mx::array& data, const Layout& layout, int precision, const std::optional<mx::array>& bias) {
        new (p) Projection{data, layout, static_cast<Precision>(precision), bias};
      }, "data"_a, "layout"_a, "precision"_a, "bias"_a.none());
  nb::class_<Norm>(m, "Norm").def("__init__", [](Norm* n, const mx::array& weight, float eps) { new (n) Norm{weight, eps}; }, "weight"_a, "eps"_a);
  nb::class_<Block>(m, "Block").def(
      "__init__",
      [](Block* b, const std::vector<std::optional<Norm>>& norms, std::vector<Projection> qkv, const std::vector<std::optional<Norm>>& head_norms,
         std::optional<mx::array> sinks, float scale, float softcap, const Projection& output, const Projection& gate_up, int gate,
         const Projection& down) {
        new (b) Block{norms.at(0), norms.at(1), norms.at(2), norms.at(3), std::move(qkv), head_norms.at(0), head_norms.at(1), std::move(sinks),
                      scale, softcap, output, gate_up, down, static_cast<Gate>(gate - 1)};
      },
      "norms"_a, "qkv"_a, "head_norms"_a, "sinks"_a.none(), "scale"_a, "softcap"_a, "output"_a, "gate_up"_a, "gate"_a, "down"_a);
  nb::class_<Blocks>(m, "Blocks");
  m.def("blocks", [](std::vector<Block> blocks) { return std::make_shared<Blocks>(std::move(blocks)); }, "blocks"_a);
  m.def("run_blocks", &run_blocks, "x"_a, "blocks"_a, "sealed"_a, "open"_a, "first"_a, "bits"_a, "plans"_a, "rotations"_a);
}

} // namespace mlxinfer::cpu
