// Decoder blocks as one operation: a step of a small model has hundreds of products, and what MLX and Python do for each costs more
// than reading its weights.

#include <algorithm>

#include "blocks/lower.h"
#include "blocks/run.h"

namespace mlxinfer::cpu {
namespace {

constexpr const char* kName = "run_blocks";

// What a block's attention works on. The pages are no inputs of the operation, which would have to be followed through MLX's graph in
// each step: they have been computed before, and the open ones are written in place.
struct Pages {
  PageArrays arrays;
  std::shared_ptr<const AttentionPlan> plan;
  std::shared_ptr<const Rotation> rotation; // or null
  int64_t source; // the number of the attention that fills them, or -1: this one
  bool read_again; // whether others read them, too
};

// Inputs: x, what is given next to it, if anything is, then the states. Outputs: x, the states afterwards, then for each attention layer
// what becomes full, if any pages do.
class RunBlocks : public Operation {
 public:
  RunBlocks(mx::Stream stream, std::shared_ptr<const Blocks> blocks, std::vector<Pages> pages, std::shared_ptr<const Stretches> stretches)
      : Operation(stream), blocks_(std::move(blocks)), pages_(std::make_shared<std::vector<Pages>>(std::move(pages))),
        stretches_(std::move(stretches)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const auto& x = inputs[0];
    allocate(outputs[0]);
    void* stream = outputs[0].data<char>();
    const void* given = blocks_->given > 0 ? elements_of(inputs[1], encoder()) : nullptr;
    size_t next = 1;
    std::vector<StatePlaces> states = places(inputs, outputs, next);
    std::vector<AttentionWork> attention;
    for (const Pages& pages : *pages_) {
      attention.push_back(pages.source < 0 ? work(pages, outputs, next) : again(attention[static_cast<size_t>(pages.source)], pages));
    }
    Plan plan(*blocks_, x.shape(0), stream, given, std::move(attention), std::move(states), stretches_, encoder());
    if (x.size() > 0) {
      const void* from = elements_of(x, encoder());
      encoder().dispatch([blocks = blocks_, pages = pages_, work = plan.take(), from, stream, bytes = x.nbytes()] {
        std::copy_n(static_cast<const char*>(from), bytes, static_cast<char*>(stream));
        for (const auto& part : work) {
          run(part);
        }
      });
    }
  }

  const char* name() const override {
    return "mlxinfer.run_blocks";
  }

 private:
  // A state that nobody else holds is written where it lies; windows are read by several tasks, and never are.
  std::vector<StatePlaces> places(const Arrays& inputs, Arrays& outputs, size_t& next) {
    std::vector<StatePlaces> found;
    const size_t first = blocks_->given > 0 ? 1 : 0;
    for (const auto& shapes : blocks_->states) {
      StatePlaces places{};
      for (size_t i = 0; i < shapes.size(); ++i, ++next) {
        const mx::array& from = inputs[next + first];
        if (i > 0 && from.is_donatable() && from.flags().row_contiguous) {
          outputs[next].copy_shared_buffer(from);
        } else {
          allocate(outputs[next]);
        }
        places.from[i] = static_cast<const float*>(elements_of(from, encoder()));
        places.to[i] = outputs[next].data<float>();
      }
      found.push_back(places);
    }
    return found;
  }

  AttentionWork work(const Pages& pages, Arrays& outputs, size_t& next) {
    AttentionWork attention{};
    attention.plan = pages.plan;
    attention.rotation = pages.rotation;
    const mx::array* filled = nullptr;
    if (pages.plan->full_pages > 0) {
      filled = &outputs[next];
      for (size_t left = pages.arrays.sealed.size() + pages.arrays.first.size(); left > 0; --left) {
        allocate(outputs[next++]);
      }
    }
    set_stores(pages.arrays, filled, encoder(), attention);
    if (pages.read_again && filled != nullptr) {
      keep_raw(attention.keys, pages.plan->full_pages);
      keep_raw(attention.values, pages.plan->full_pages);
    }
    return attention;
  }

  // Pages that become codes, as they came: for those who read them later in the step.
  void keep_raw(PageStore& store, int64_t count) {
    if (store.form.has_codes()) {
      mx::array a({static_cast<int>(store.kv_heads), static_cast<int>(count), static_cast<int>(store.raw.bytes())}, mx::uint8, nullptr, {});
      allocate(a);
      store.filled_raw = {a.data<char>(), nullptr, count};
      encoder().add_temporary(std::move(a));
    }
  }

  static AttentionWork again(const AttentionWork& source, const Pages& pages) {
    AttentionWork work = source;
    work.rotation = pages.rotation;
    return work;
  }

  const std::shared_ptr<const Blocks> blocks_;
  const std::shared_ptr<const std::vector<Pages>> pages_;
  const std::shared_ptr<const Stretches> stretches_;
};

// Contiguous and computed.
void settle_pages(PageArrays& pages) {
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
}

void check_attend(const Attend& a, PageArrays& pages, const AttentionPlan& plan, const Rotation* rotation) {
  check_pages(kName, pages, plan);
  settle_pages(pages);
  const HeadSizes sizes = pages.sizes();
  const int64_t heads = a.y.count / sizes.value_dim;
  bool fits = heads > 0 && heads * sizes.value_dim == a.y.count && heads % sizes.kv == 0 && (!a.sinks || static_cast<int64_t>(a.sinks->size()) == heads);
  const int64_t turned = sizes.key_dim - a.still, width = a.turned ? a.still : sizes.key_dim;
  fits = fits && turned > 0 && a.queries.count >= (heads - 1) * a.query_step + width && a.query_step >= width;
  fits = fits && (!a.turned || (a.turned->count >= (heads - 1) * a.turned_step + turned && a.turned_step >= turned));
  fits = fits && (!a.keys || (a.keys->count == sizes.kv * sizes.key_dim && a.values->count == sizes.kv * sizes.value_dim));
  for (const auto* norm : {&a.query_norm, &a.key_norm}) {
    fits = fits && (!*norm || static_cast<int64_t>((*norm)->weight.size()) == (a.still > 0 ? a.still : sizes.key_dim));
  }
  fits = fits && (!a.value_norm || static_cast<int64_t>(a.value_norm->weight.size()) == sizes.value_dim);
  fits = fits && (!a.query_gain || static_cast<int64_t>(a.query_gain->size()) == sizes.key_dim);
  if (!fits) {
    refuse(kName, "the matrices of a block do not give queries, keys and values for pages " + shapes_text(pages.open) + ".");
  }
  if (rotation != nullptr && (rotation->rows != plan.rows || 2 * rotation->half > turned)) {
    refuse(kName, "the rotation must have the plan's rows and at most the heads' channels.");
  }
}

// Whether pages that are read again are those that were filled.
void check_source(const std::vector<Pages>& before, int64_t source, const PageArrays& arrays, const AttentionPlan& plan) {
  if (source < 0) {
    return;
  }
  const Pages& filled = before[static_cast<size_t>(source)];
  bool same = filled.plan.get() == &plan && filled.arrays.sealed.size() == arrays.sealed.size();
  for (size_t i = 0; same && i < 2; ++i) {
    same = filled.arrays.open[i].data<char>() == arrays.open[i].data<char>();
  }
  if (!same) {
    refuse(kName, "pages that are read again must be those that another attention of the step fills.");
  }
}

void check_states(const Blocks& blocks, const Arrays& states, const Stretches* stretches, int64_t rows) {
  size_t next = 0;
  for (const auto& shapes : blocks.states) {
    for (const auto& shape : shapes) {
      mx::Shape wanted{stretches == nullptr ? 0 : static_cast<int>(stretches->all.size())};
      for (auto size : shape) {
        wanted.push_back(size);
      }
      if (next >= states.size() || states[next].shape() != wanted || states[next].dtype() != mx::float32) {
        refuse(kName, "states must be float32, and that of a layer " + shape_text(wanted) + ".");
      }
      ++next;
    }
  }
  if (next != states.size() || (next > 0 && stretches->rows != rows)) {
    refuse(kName, "there must be states for the recurrent layers only, and the rows of all sequences.");
  }
}

} // namespace

Arrays run_blocks(const mx::array& x, std::shared_ptr<Blocks> blocks, StepArrays given) {
  const size_t count = blocks->attends.size();
  if (given.sealed.size() != count || given.open.size() != count || given.first.size() != count || given.bits.size() != count ||
      given.plans.size() != count || given.rotations.size() != count) {
    refuse(kName, "every block needs pages, a plan and a rotation.");
  }
  if (x.ndim() != 2 || x.shape(1) != blocks->hidden || x.dtype() != blocks->dtype) {
    refuse(kName, "x " + dtype_text(x) + " " + shape_text(x.shape()) + " must be [rows, " + std::to_string(blocks->hidden) + "] in the blocks' dtype.");
  }
  check_states(*blocks, given.states, given.stretches.get(), x.shape(0));
  const auto& beside = given.given;
  if (beside.has_value() != (blocks->given > 0) ||
      (beside && (beside->shape() != mx::Shape{x.shape(0), static_cast<int>(blocks->given)} || beside->dtype() != x.dtype()))) {
    refuse(kName, "what is given next to x must be [rows, " + std::to_string(blocks->given) + "] in the blocks' dtype.");
  }
  std::vector<mx::Shape> shapes{x.shape()};
  std::vector<mx::Dtype> dtypes{x.dtype()};
  Arrays inputs{x};
  if (beside) {
    inputs.push_back(*beside);
  }
  for (const auto& state : given.states) {
    shapes.push_back(state.shape());
    dtypes.push_back(state.dtype());
    inputs.push_back(state);
  }
  std::vector<Pages> pages;
  for (size_t i = 0; i < count; ++i) {
    const auto& plan = given.plans[i];
    if (!plan || plan->rows != x.shape(0)) {
      refuse(kName, "the plan must have the rows of x.");
    }
    PageArrays arrays{std::move(given.sealed[i]), std::move(given.first[i]), std::move(given.open[i]), {given.bits[i].first, given.bits[i].second}};
    check_attend(*blocks->attends[i], arrays, *plan, given.rotations[i].get());
    const int64_t source = blocks->attends[i]->source;
    check_source(pages, source, arrays, *plan);
    if (plan->full_pages > 0 && source < 0) {
      for (const auto& kind : filled_kinds(arrays, *plan)) {
        shapes.push_back(kind.shape);
        dtypes.push_back(kind.dtype);
      }
    }
    pages.push_back({std::move(arrays), plan, given.rotations[i], source, blocks->read_again[i]});
  }
  auto operation = std::make_shared<RunBlocks>(cpu_stream(), std::move(blocks), std::move(pages), std::move(given.stretches));
  return mx::array::make_arrays(std::move(shapes), dtypes, operation, inputs);
}

} // namespace mlxinfer::cpu
