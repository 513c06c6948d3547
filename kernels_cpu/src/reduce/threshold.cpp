// Where top-k and top-p cut a row of logits, without sorting all of it: the tokens that count are few.

#include "reduce/threshold.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "op/bindings.h"
#include "op/op.h"
#include "reduce/argmax.h"
#include "threads/pool.h"

#include "mlx/ops.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kPieceElements = 8192; // some microseconds of work
constexpr float kFirstDepth = 8.0f; // below the highest logit, in which to look first

// A row of logits; `find` gives the lowest logit that stays.
class Row {
 public:
  Row(const float* x, int64_t size) : x_(x), size_(size), parts_(static_cast<size_t>((size + kPieceElements - 1) / kPieceElements)) {}

  float find(int64_t top_k, float top_p) {
    highest_ = over_pieces([](const float* x, int64_t size) { return argmax_kernels().highest(x, size); },
                           [](float a, float b) { return std::max(a, b); });
    if (!std::isfinite(highest_) || (top_k >= size_ && top_p >= 1)) {
      return -std::numeric_limits<float>::infinity();
    }
    return top_k < size_ ? among(top_k, top_p) : of_all(top_p);
  }

 private:
  template <typename Compute, typename Combine>
  float over_pieces(Compute compute, Combine combine) {
    parallel_for(parts_.size(), 1, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const int64_t at = static_cast<int64_t>(i) * kPieceElements;
        parts_[i] = compute(x_ + at, std::min(kPieceElements, size_ - at));
      }
    });
    return std::accumulate(parts_.begin() + 1, parts_.end(), parts_.front(), combine);
  }

  // The logits within `depth` of the highest, unordered.
  void collect(float depth) {
    found_.resize(static_cast<size_t>(size_));
    found_.resize(static_cast<size_t>(threshold_kernels().collect(x_, size_, highest_ - depth, found_.data())));
  }

  float weight(float logit) const {
    return std::exp(logit - highest_);
  }

  // Of the k highest, those before which less than top_p of their sum lies.
  float among(int64_t k, float top_p) {
    float depth = kFirstDepth;
    for (collect(depth); static_cast<int64_t>(found_.size()) < k && depth < std::numeric_limits<float>::infinity(); collect(depth)) {
      depth = depth > 1e3f ? std::numeric_limits<float>::infinity() : 2 * depth;
    }
    k = std::min<int64_t>(k, static_cast<int64_t>(found_.size())); // NaN is not among them
    std::partial_sort(found_.begin(), found_.begin() + k, found_.end(), std::greater<float>());
    found_.resize(static_cast<size_t>(k));
    double sum = 0;
    for (float logit : found_) {
      sum += weight(logit);
    }
    return cut(top_p, sum);
  }

  float of_all(float top_p) {
    const float sum = over_pieces([this](const float* x, int64_t size) { return threshold_kernels().exp_sum(x, size, highest_); }, std::plus<float>());
    for (float depth = kFirstDepth;; depth *= 2) {
      const bool last = depth > 1e3f;
      collect(last ? std::numeric_limits<float>::infinity() : depth);
      double within = 0;
      for (float logit : found_) {
        within += weight(logit);
      }
      if (last || within >= top_p * sum) {
        std::sort(found_.begin(), found_.end(), std::greater<float>());
        return cut(top_p, sum);
      }
    }
  }

  float cut(float top_p, double sum) const {
    double before = 0;
    float lowest = found_.front();
    for (float logit : found_) {
      if (top_p < 1 && before >= top_p * sum) {
        break;
      }
      lowest = logit;
      before += weight(logit);
    }
    return lowest;
  }

  const float* x_;
  const int64_t size_;
  float highest_ = 0;
  std::vector<float> parts_, found_;
};

// Inputs: logits, top_k, top_p.
class Threshold : public Operation {
 public:
  using Operation::Operation;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    if (outputs[0].size() == 0) {
      return;
    }
    auto* top_k = static_cast<const int32_t*>(elements_of(inputs[1], encoder()));
    auto* top_p = static_cast<const float*>(elements_of(inputs[2], encoder()));
    encoder().dispatch([x = rows_of(inputs[0], encoder()), top_k, top_p, out = outputs[0].data<float>()] {
      for (int64_t row = 0; row < x.count; ++row) {
        out[row] = Row(x.row<float>(row), x.size).find(top_k[row], top_p[row]);
      }
    });
  }

  const char* name() const override {
    return "mlxinfer.threshold";
  }
};

mx::array threshold(const mx::array& logits, const mx::array& top_k, const mx::array& top_p) {
  const mx::Shape rows = logits.ndim() == 2 ? mx::Shape{logits.shape(0)} : mx::Shape{};
  if (logits.ndim() != 2 || logits.shape(1) == 0 || logits.dtype() != mx::float32 || top_k.shape() != rows || top_p.shape() != rows) {
    refuse("threshold", "logits must be float32 [rows, n], not " + dtype_text(logits) + " " + shape_text(logits.shape()) + ", with a top_k and top_p for each row.");
  }
  const auto stream = cpu_stream();
  return mx::array(rows, mx::float32, std::make_shared<Threshold>(stream),
                   {logits, mx::astype(mx::maximum(top_k, mx::array(1), stream), mx::int32, stream), mx::astype(top_p, mx::float32, stream)});
}

} // namespace

void bind_threshold(nb::module_& m) {
  m.def("threshold", &threshold, "logits"_a, "top_k"_a, "top_p"_a);
}

} // namespace mlxinfer::cpu
