// Attention over the paged cache as MLX sees it.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
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
  int bits[2]; // of sealed keys and values
  bool first; // whether there are first pages of 16 bits
};

// Inputs: sealed pages, first pages, open pages, the rows, then norms and sinks as far as there are any.
// Outputs: answers, open keys, open values, then what becomes full.
class PagedAttention : public Operation {
 public:
  PagedAttention(mx::Stream stream, Options options) : Operation(stream), options_(std::move(options)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    AttentionWork work{};
    work.plan = options_.plan;
    work.rotation = options_.rotation;
    work.scale = options_.scale;
    work.softcap = options_.softcap;
    auto next = inputs.begin();
    PageArrays pages = take_pages(next, outputs);
    set_stores(pages, outputs.data() + 3, encoder(), work);
    work.heads_per_kv = options_.heads / work.keys.kv_heads;
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

  // The pages, with the open ones, which are written in place, as they are in the outputs.
  PageArrays take_pages(Arrays::const_iterator& next, Arrays& outputs) {
    PageArrays pages;
    std::copy(options_.bits, options_.bits + 2, pages.bits);
    auto take = [&](int count, Arrays& to) {
      to.assign(next, next + count);
      next += count;
    };
    take((options_.bits[0] == 16 ? 1 : 2) + (options_.bits[1] == 16 ? 1 : 2), pages.sealed);
    take(options_.first ? 2 : 0, pages.first);
    for (size_t i = 1; i < 3; ++i) {
      keep_open(*next++, outputs[i]);
      pages.open.push_back(outputs[i]);
    }
    std::for_each(outputs.begin() + 3, outputs.end(), allocate);
    return pages;
  }

  void keep_open(const mx::array& open, mx::array& kept) {
    if (open.flags().row_contiguous) {
      kept.copy_shared_buffer(open);
      return;
    }
    allocate(kept);
    encoder().dispatch([from = static_cast<const char*>(elements_of(open, encoder())), to = kept.data<char>(), size = open.nbytes()] {
      std::copy_n(from, size, to);
    });
  }

  const Options options_;
};

// Throws unless the rows are those of the plan and their heads fit the pages; otherwise returns the number of query heads.
int64_t check_rows(const Arrays& rows, const PageArrays& pages, const AttentionPlan& plan) {
  const HeadSizes sizes = pages.sizes();
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
           shapes_text(pages.open) + ".");
  }
  return heads;
}

std::vector<mx::array> paged_attention(
    const Arrays& rows,
    const Arrays& sealed,
    const Arrays& open,
    const Arrays& first,
    const std::pair<int, int>& bits,
    std::shared_ptr<AttentionPlan> plan,
    float scale,
    std::optional<float> softcap,
    const std::optional<mx::array>& sinks,
    const std::optional<mx::array>& query_norm,
    const std::optional<mx::array>& key_norm,
    float eps,
    std::shared_ptr<Rotation> rotation) {
  const PageArrays pages{sealed, first, open, {bits.first, bits.second}};
  check_pages(kName, pages, *plan);
  const int heads = static_cast<int>(check_rows(rows, pages, *plan)), key_dim = open[0].shape(3);
  if (rotation && (rotation->rows != plan->rows || 2 * rotation->half > key_dim)) {
    refuse(kName, "the rotation must have the plan's rows and at most the heads' channels.");
  }
  Arrays inputs;
  for (const auto* part : {&sealed, &first, &open, &rows}) {
    inputs.insert(inputs.end(), part->begin(), part->end());
  }
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
  std::vector<mx::Shape> shapes{{static_cast<int>(plan->rows), heads * open[1].shape(3)}, open[0].shape(), open[1].shape()};
  std::vector<mx::Dtype> dtypes{rows[0].dtype(), open[0].dtype(), open[1].dtype()};
  for (const auto& kind : filled_kinds(pages, *plan)) {
    shapes.push_back(kind.shape);
    dtypes.push_back(kind.dtype);
  }
  Options options{std::move(plan), std::move(rotation), scale, softcap.value_or(0.0f), eps, query_norm.has_value(), key_norm.has_value(),
                  sinks.has_value(), static_cast<int>(rows.size()), heads, {bits.first, bits.second}, !first.empty()};
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<PagedAttention>(cpu_stream(), std::move(options)), inputs);
}

} // namespace

void bind_paged_attention(nb::module_& m) {
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def_ro("full_pages", &AttentionPlan::full_pages)
      .def_ro("first_full_pages", &AttentionPlan::first_full_pages);
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
      "first"_a,
      "bits"_a,
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
