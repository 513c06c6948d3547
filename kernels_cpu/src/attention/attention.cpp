// Attention over the paged cache as MLX sees it.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>

#include "attention/operands.h"
#include "op/bindings.h"
#include "op/op.h"

#include "mlx/ops.h"

namespace mlxinfer::cpu {
namespace {

constexpr const char* kName = "paged_attention";

struct Options {
  std::shared_ptr<const AttentionPlan> plan;
  std::shared_ptr<const Rotation> rotation;
  float scale, softcap, eps;
  bool query_norm, key_norm, sinks;
  int pieces; // that rows come in
  int64_t heads; // of queries
};

// Inputs: sealed keys, sealed values, open keys, open values, the rows, then norms and sinks as far as there are any.
// Outputs: answers, open keys, open values, full keys, full values.
class PagedAttention : public Operation {
 public:
  PagedAttention(mx::Stream stream, Options options) : Operation(stream), options_(std::move(options)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    AttentionWork work{};
    work.plan = options_.plan;
    work.rotation = options_.rotation;
    work.scale = options_.scale;
    work.softcap = options_.softcap;
    work.keys = store(inputs[0], inputs[2], outputs[1], outputs[3]);
    work.values = store(inputs[1], inputs[3], outputs[2], outputs[4]);
    work.heads_per_kv = options_.heads / work.keys.kv_heads;
    auto next = inputs.begin() + 4;
    if (next->ndim() == 3) {
      work.queries = heads_of(*next++);
      work.new_keys = heads_of(*next++);
      work.new_values = heads_of(*next++);
    } else {
      std::vector<RowsOfHeads> pieces;
      for (int i = 0; i < options_.pieces; ++i, ++next) {
        pieces.push_back({rows_of(*next, encoder()), float_of(*next)});
      }
      split_heads(pieces, options_.heads, work);
    }
    auto prepare = [&](Heads& heads, bool normed) {
      heads.norm = normed ? elements_of(*next++, encoder()) : nullptr;
      heads.eps = options_.eps;
      heads.rotation = options_.rotation.get();
    };
    prepare(work.queries, options_.query_norm);
    prepare(work.new_keys, options_.key_norm);
    work.sinks = options_.sinks ? static_cast<const float*>(elements_of(*next++, encoder())) : nullptr;
    allocate(outputs[0]);
    work.out = outputs[0].data<char>();
    work.out_item_size = static_cast<int64_t>(outputs[0].itemsize());
    if (options_.plan->rows > 0) {
      encoder().dispatch([work = std::move(work)] { work.run(); });
    }
  }

  const char* name() const override {
    return "mlxinfer.paged_attention";
  }

 private:
  // Heads may be part of longer rows; only a head itself must be contiguous, otherwise all are copied.
  Heads heads_of(const mx::array& a) {
    const auto item = static_cast<int64_t>(a.itemsize());
    Heads heads{};
    heads.dim = a.shape(2);
    heads.dtype = static_cast<int>(float_of(a));
    if (a.shape(2) == 1 || a.strides(2) == 1) {
      heads.data = a.data<char>();
      heads.row_stride = a.strides(0) * item;
      heads.head_stride = a.strides(1) * item;
    } else {
      heads.data = static_cast<const char*>(elements_of(a, encoder()));
      heads.head_stride = heads.dim * item;
      heads.row_stride = heads.head_stride * a.shape(1);
    }
    return heads;
  }

  // The open pages, written in place, become `new_open`.
  PageStore store(const mx::array& sealed, const mx::array& open, mx::array& new_open, mx::array& full) {
    if (open.flags().row_contiguous) {
      new_open.copy_shared_buffer(open);
    } else {
      allocate(new_open);
      encoder().dispatch([from = static_cast<const char*>(elements_of(open, encoder())), to = new_open.data<char>(), size = open.nbytes()] {
        std::copy_n(from, size, to);
      });
    }
    allocate(full);
    PageStore pages = page_store(sealed, new_open, *options_.plan, encoder());
    pages.full = full.data<char>();
    return pages;
  }

  const Options options_;
};

// Throws unless the rows are those of the plan and their heads fit the pages; otherwise returns the number of query heads.
int64_t check_rows(const Arrays& rows, const Arrays& open, const AttentionPlan& plan) {
  const HeadSizes sizes{open[0].shape(1), open[0].shape(3), open[1].shape(3)};
  const size_t axes = rows.empty() ? 0 : rows[0].ndim();
  bool fits = axes == 2 || (axes == 3 && rows.size() == 3);
  for (const auto& a : rows) {
    fits = fits && is_floating(a) && a.dtype() == rows[0].dtype() && a.ndim() == axes && a.shape(0) == plan.rows;
  }
  int64_t heads = 0;
  if (fits && axes == 3) {
    heads = rows[0].shape(1);
    auto shape = [&](int64_t count, int64_t dim) { return mx::Shape{rows[0].shape(0), static_cast<int>(count), static_cast<int>(dim)}; };
    fits = heads > 0 && heads % sizes.kv == 0 && rows[0].shape() == shape(heads, sizes.key_dim) &&
        rows[1].shape() == shape(sizes.kv, sizes.key_dim) && rows[2].shape() == shape(sizes.kv, sizes.value_dim);
  } else if (fits) {
    std::vector<int64_t> widths;
    for (const auto& a : rows) {
      widths.push_back(a.shape(1));
    }
    heads = query_heads(widths, sizes);
    fits = heads > 0;
  }
  if (!fits) {
    refuse(kName, "rows " + shapes_text(rows) + " must be the plan's " + std::to_string(plan.rows) + " with queries, keys and values for pages " +
           shapes_text(open) + ".");
  }
  return heads;
}

std::vector<mx::array> paged_attention(
    const Arrays& rows,
    const Arrays& sealed,
    const Arrays& open,
    std::shared_ptr<AttentionPlan> plan,
    float scale,
    std::optional<float> softcap,
    const std::optional<mx::array>& sinks,
    const std::optional<mx::array>& query_norm,
    const std::optional<mx::array>& key_norm,
    float eps,
    std::shared_ptr<Rotation> rotation) {
  check_pages(kName, sealed, open, *plan);
  const int heads = static_cast<int>(check_rows(rows, open, *plan)), key_dim = open[0].shape(3);
  if (rotation && (rotation->rows != plan->rows || 2 * rotation->half > key_dim)) {
    refuse(kName, "the rotation must have the plan's rows and at most the heads' channels.");
  }
  Arrays inputs{sealed[0], sealed[1], open[0], open[1]};
  inputs.insert(inputs.end(), rows.begin(), rows.end());
  for (const auto& norm : {query_norm, key_norm}) {
    if (norm) {
      if (norm->shape() != mx::Shape{key_dim}) {
        refuse(kName, "norms " + shape_text(norm->shape()) + " must have the heads' " + std::to_string(key_dim) + " channels.");
      }
      inputs.push_back(mx::astype(*norm, rows[0].dtype(), cpu_stream()));
    }
  }
  if (sinks) {
    if (sinks->shape() != mx::Shape{heads}) {
      refuse(kName, "sinks " + shape_text(sinks->shape()) + " must be one per query head.");
    }
    inputs.push_back(mx::astype(*sinks, mx::float32, cpu_stream()));
  }
  const int count = static_cast<int>(plan->rows), full = static_cast<int>(plan->full_pages), value_dim = open[1].shape(3);
  auto pages = [&](const mx::array& a) { return mx::Shape{a.shape(1), full, kPageTokens, a.shape(3)}; };
  Options options{std::move(plan), std::move(rotation), scale, softcap.value_or(0.0f), eps, query_norm.has_value(), key_norm.has_value(),
                  sinks.has_value(), static_cast<int>(rows.size()), heads};
  return mx::array::make_arrays(
      {{count, heads * value_dim}, open[0].shape(), open[1].shape(), pages(open[0]), pages(open[1])},
      {rows[0].dtype(), open[0].dtype(), open[1].dtype(), open[0].dtype(), open[1].dtype()},
      std::make_shared<PagedAttention>(cpu_stream(), std::move(options)),
      inputs);
}

} // namespace

void bind_paged_attention(nb::module_& m) {
  nb::class_<AttentionPlan>(m, "AttentionPlan").def_ro("full_pages", &AttentionPlan::full_pages);
  nb::class_<Rotation>(m, "Rotation");
  m.def("attention_plan", [](std::vector<AttentionPlan::Row> segments, std::optional<int64_t> window) {
    return std::make_shared<AttentionPlan>(std::move(segments), window);
  }, "segments"_a, "window"_a.none());
  m.def("rotation", [](const std::vector<Rotation::Part>& parts) { return std::make_shared<Rotation>(parts); }, "parts"_a);
  m.def(
      "paged_attention",
      &paged_attention,
      "rows"_a,
      "sealed"_a,
      "open"_a,
      "plan"_a,
      "scale"_a,
      "softcap"_a.none(),
      "sinks"_a.none(),
      "query_norm"_a.none(),
      "key_norm"_a.none(),
      "eps"_a,
      "rotation"_a.none());
}

} // namespace mlxinfer::cpu
