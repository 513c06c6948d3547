#include <mlx/ops.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include "attention/plan.h"
#include "attention/work.h"
#include "op/bindings.h"
#include "op/op.h"

namespace mlxinfer::cpu {
namespace {

// Inputs: queries, keys, values, sealed keys, sealed values, open keys, open values, and perhaps sinks.
class PagedAttention : public Operation {
 public:
  PagedAttention(mx::Stream stream, std::shared_ptr<const AttentionPlan> plan, float scale, float softcap)
      : Operation(stream), plan_(std::move(plan)), scale_(scale), softcap_(softcap) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    AttentionWork work;
    work.plan = plan_;
    work.keys = store(inputs[1], inputs[3], inputs[5], outputs[1], outputs[3]);
    work.values = store(inputs[2], inputs[4], inputs[6], outputs[2], outputs[4]);
    work.queries = rows(inputs[0], work.query_stride);
    work.query_item_size = static_cast<int64_t>(inputs[0].itemsize());
    work.heads_per_kv = inputs[0].shape(1) / inputs[1].shape(1);
    work.dtype = static_cast<int>(float_of(inputs[0]));
    work.scale = scale_;
    work.softcap = softcap_;
    work.sinks = inputs.size() > 7 ? static_cast<const float*>(elements_of(inputs[7], encoder())) : nullptr;
    allocate(outputs[0]);
    work.out = outputs[0].data<char>();
    if (plan_->rows > 0) {
      encoder().dispatch([work = std::move(work)] { work.run(); });
    }
  }

  const char* name() const override {
    return "mlxinfer.paged_attention";
  }

 private:
  // A row of heads may be part of a longer row, as in a joined projection's output; anything else is copied.
  const char* rows(const mx::array& a, int64_t& stride) {
    auto item = static_cast<int64_t>(a.itemsize());
    bool one = a.shape(1) == 1 || a.strides(1) == a.shape(2);
    if (one && (a.shape(2) == 1 || a.strides(2) == 1)) {
      stride = a.strides(0) * item;
      return a.data<char>();
    }
    stride = static_cast<int64_t>(a.shape(1)) * a.shape(2) * item;
    return static_cast<const char*>(elements_of(a, encoder()));
  }

  PageStore store(const mx::array& fresh, const mx::array& sealed, const mx::array& open, mx::array& new_open, mx::array& full) {
    PageStore store;
    store.kv_heads = open.shape(1);
    store.dim = open.shape(3);
    store.sealed_pages = sealed.shape(1);
    store.full_pages = plan_->full_pages;
    store.item_size = static_cast<int64_t>(open.itemsize());
    store.row_item_size = static_cast<int64_t>(fresh.itemsize());
    store.dtype = static_cast<int>(float_of(open));
    store.convert = page_kernels().convert[static_cast<int>(float_of(fresh))][store.dtype];
    store.rows = rows(fresh, store.row_stride);
    store.sealed = static_cast<const char*>(elements_of(sealed, encoder()));
    if (open.flags().row_contiguous) {
      new_open.copy_shared_buffer(open);
    } else {
      allocate(new_open);
      encoder().dispatch([from = static_cast<const char*>(elements_of(open, encoder())), to = new_open.data<char>(), size = open.nbytes()] {
        std::copy_n(from, size, to);
      });
    }
    store.open = new_open.data<char>();
    allocate(full);
    store.full = full.data<char>();
    return store;
  }

  std::shared_ptr<const AttentionPlan> plan_;
  float scale_, softcap_;
};

void check_rows(const char* name, const mx::array& a, const mx::array& sealed, const mx::array& open, const AttentionPlan& plan) {
  const char* op = "paged_attention";
  auto fail = [&](const std::string& problem) {
    refuse(op, std::string(name) + " " + shape_text(a.shape()) + " " + problem);
  };
  if (a.ndim() != 3 || sealed.ndim() != 4 || open.ndim() != 4) {
    fail("must be [rows, heads, dim], and pages have four axes.");
  }
  mx::Shape page{a.shape(1), kPageTokens, a.shape(2)};
  if (mx::Shape{sealed.shape(0), sealed.shape(2), sealed.shape(3)} != page || mx::Shape(open.shape().begin() + 1, open.shape().end()) != page) {
    fail("does not fit sealed pages " + shape_text(sealed.shape()) + " and open pages " + shape_text(open.shape()) + ".");
  }
  if (a.shape(0) != plan.rows || sealed.shape(1) < plan.sealed_pages || open.shape(0) < plan.slots) {
    fail("and its pages must have the " + std::to_string(plan.rows) + " rows, " + std::to_string(plan.slots) + " slots and " +
         std::to_string(plan.sealed_pages) + " pages of the plan.");
  }
  if (!is_floating(a) || !is_floating(open) || open.dtype() != sealed.dtype()) {
    fail("and its pages must be float32, bfloat16 or float16, all pages alike.");
  }
}

std::vector<mx::array> paged_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::vector<mx::array>& sealed,
    const std::vector<mx::array>& open,
    std::shared_ptr<AttentionPlan> plan,
    float scale,
    std::optional<float> softcap,
    const std::optional<mx::array>& sinks) {
  const char* op = "paged_attention";
  if (sealed.size() != 2 || open.size() != 2) {
    refuse(op, "sealed and open pages are those of the keys and those of the values.");
  }
  check_rows("keys", k, sealed[0], open[0], *plan);
  check_rows("values", v, sealed[1], open[1], *plan);
  if (q.ndim() != 3 || q.shape(0) != k.shape(0) || q.shape(2) != k.shape(2) || v.shape(1) != k.shape(1) || k.shape(1) == 0 ||
      q.shape(1) % k.shape(1) != 0) {
    refuse(op, "queries " + shape_text(q.shape()) + " do not fit keys " + shape_text(k.shape()) + " and values " + shape_text(v.shape()) + ".");
  }
  if (!is_floating(q) || q.dtype() != k.dtype() || q.dtype() != v.dtype()) {
    refuse(op, "queries, keys and values must be float32, bfloat16 or float16, all alike.");
  }
  std::vector<mx::array> inputs{q, k, v, sealed[0], sealed[1], open[0], open[1]};
  if (sinks) {
    if (sinks->shape() != mx::Shape{q.shape(1)}) {
      refuse(op, "sinks " + shape_text(sinks->shape()) + " must be one per query head.");
    }
    inputs.push_back(mx::astype(*sinks, mx::float32, cpu_stream()));
  }
  int full = static_cast<int>(plan->full_pages);
  auto pages = [&](const mx::array& a) { return mx::Shape{a.shape(1), full, kPageTokens, a.shape(2)}; };
  return mx::array::make_arrays(
      {{q.shape(0), q.shape(1), v.shape(2)}, open[0].shape(), open[1].shape(), pages(k), pages(v)},
      {q.dtype(), open[0].dtype(), open[1].dtype(), open[0].dtype(), open[1].dtype()},
      std::make_shared<PagedAttention>(cpu_stream(), std::move(plan), scale, softcap.value_or(0.0f)),
      inputs);
}

} // namespace

void bind_paged_attention(nb::module_& m) {
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<std::vector<AttentionPlan::Row>, std::optional<int64_t>>(), "segments"_a, "window"_a = nb::none());
  m.def(
      "paged_attention",
      &paged_attention,
      "q"_a,
      "k"_a,
      "v"_a,
      "sealed"_a,
      "open"_a,
      "plan"_a,
      nb::kw_only(),
      "scale"_a,
      "softcap"_a = nb::none(),
      "sinks"_a = nb::none());
}

} // namespace mlxinfer::cpu
