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
};

// Inputs: x, then the states. Outputs: x, the states afterwards, then for each attention layer what becomes full, if any pages do.
class RunBlocks : public Operation {
 public:
  RunBlocks(mx::Stream stream, std::shared_ptr<const Blocks> blocks, std::vector<Pages> pages, std::shared_ptr<const Stretches> stretches)
      : Operation(stream), blocks_(std::move(blocks)), pages_(std::make_shared<std::vector<Pages>>(std::move(pages))),
        stretches_(std::move(stretches)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const auto& x = inputs[0];
    allocate(outputs[0]);
    void* stream = outputs[0].data<char>();
    size_t next = 1;
    std::vector<StatePlaces> states = places(inputs, outputs, next);
    std::vector<AttentionWork> attention;
    for (const Pages& pages : *pages_) {
      attention.push_back(work(pages, outputs, next));
    }
    Plan plan(*blocks_, x.shape(0), stream, std::move(attention), std::move(states), stretches_, encoder());
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
    for (const auto& shapes : blocks_->states) {
      StatePlaces places{};
      for (size_t i = 0; i < shapes.size(); ++i, ++next) {
        const mx::array& from = inputs[next];
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
    return attention;
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
  fits = fits && a.queries.count >= (heads - 1) * a.query_step + sizes.key_dim && a.query_step >= sizes.key_dim;
  fits = fits && a.keys.count == sizes.kv * sizes.key_dim && a.values.count == sizes.kv * sizes.value_dim;
  for (const auto* norm : {&a.query_norm, &a.key_norm}) {
    fits = fits && (!*norm || static_cast<int64_t>((*norm)->weight.size()) == sizes.key_dim);
  }
  if (!fits) {
    refuse(kName, "the matrices of a block do not give queries, keys and values for pages " + shapes_text(pages.open) + ".");
  }
  if (rotation != nullptr && (rotation->rows != plan.rows || 2 * rotation->half > sizes.key_dim)) {
    refuse(kName, "the rotation must have the plan's rows and at most the heads' channels.");
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
  std::vector<mx::Shape> shapes{x.shape()};
  std::vector<mx::Dtype> dtypes{x.dtype()};
  Arrays inputs{x};
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
    if (plan->full_pages > 0) {
      for (const auto& kind : filled_kinds(arrays, *plan)) {
        shapes.push_back(kind.shape);
        dtypes.push_back(kind.dtype);
      }
    }
    pages.push_back({std::move(arrays), plan, given.rotations[i]});
  }
  auto operation = std::make_shared<RunBlocks>(cpu_stream(), std::move(blocks), std::move(pages), std::move(given.stretches));
  return mx::array::make_arrays(std::move(shapes), dtypes, operation, inputs);
}

} // namespace mlxinfer::cpu
