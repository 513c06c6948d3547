#include "mixture/rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "memory/scratch.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kPieceElements = 16384;

void softmax(float* x, int64_t size) {
  const float most = *std::max_element(x, x + size);
  float sum = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    x[i] = std::exp(x[i] - most);
    sum += x[i];
  }
  for (int64_t i = 0; i < size; ++i) {
    x[i] /= sum;
  }
}

// Leaves minus infinity for the experts of other groups. `ranks` has room for the groups and a group's experts.
void keep_groups(const Route& r, float* wanted, float* ranks) {
  const int64_t size = r.experts / r.groups, ranked = std::min(r.ranked, size);
  float* sorted = ranks + r.groups;
  for (int64_t g = 0; g < r.groups; ++g) {
    std::partial_sort_copy(wanted + g * size, wanted + (g + 1) * size, sorted, sorted + ranked, std::greater<float>());
    ranks[g] = std::accumulate(sorted, sorted + ranked, 0.0f);
  }
  for (int64_t dropped = r.groups - r.kept; dropped > 0; --dropped) {
    const int64_t g = std::min_element(ranks, ranks + r.groups) - ranks;
    ranks[g] = std::numeric_limits<float>::infinity();
    std::fill_n(wanted + g * size, size, -std::numeric_limits<float>::infinity());
  }
}

void choose(const Route& r, const float* bias, const float* gains, float* scores, float* room, int32_t* experts, float* shares) {
  if (r.scores == Scores::softmax) {
    softmax(scores, r.experts);
  } else if (r.scores == Scores::sigmoid) {
    std::transform(scores, scores + r.experts, scores, [](float x) { return 1.0f / (1.0f + std::exp(-x)); });
  }
  float* wanted = room;
  for (int64_t e = 0; e < r.experts; ++e) {
    const float value = bias == nullptr ? scores[e] : scores[e] + bias[e];
    wanted[e] = std::isnan(value) ? -std::numeric_limits<float>::infinity() : value;
  }
  if (r.kept < r.groups) {
    keep_groups(r, wanted, room + r.experts);
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < r.chosen; ++i) { // few of few: searching anew each time is as fast as sorting
    const int64_t best = std::max_element(wanted, wanted + r.experts) - wanted;
    experts[i] = static_cast<int32_t>(best);
    shares[i] = scores[best];
    sum += scores[best];
    wanted[best] = -std::numeric_limits<float>::infinity();
    for (int64_t before = 0; before < i; ++before) { // none is chosen twice, even where all that is left is minus infinity
      if (experts[before] == best) {
        int64_t other = 0;
        while (std::find(experts, experts + i, static_cast<int32_t>(other)) != experts + i) {
          ++other;
        }
        sum += scores[other] - scores[best];
        experts[i] = static_cast<int32_t>(other);
        shares[i] = scores[other];
        break;
      }
    }
  }
  if (r.scores == Scores::none) {
    softmax(shares, r.chosen);
    sum = 1.0f;
  }
  const float factor = r.normalized ? r.scale / (std::max(sum, r.least) + r.added) : r.scale;
  for (int64_t i = 0; i < r.chosen; ++i) {
    shares[i] *= gains == nullptr ? factor : factor * gains[experts[i]];
  }
}

} // namespace

void RouteRows::run() const {
  const int64_t size = route.experts, item = item_bytes(dtype);
  parallel_for(static_cast<size_t>(logits.count), 16, [&](size_t begin, size_t end) {
    static thread_local Scratch scratch;
    float* scores = scratch.floats(3 * size + route.groups);
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      mixture_kernels().widen[static_cast<int>(dtype)](static_cast<const char*>(logits.data) + i * logits.stride * item, scores, size);
      choose(route, bias, gains, scores, scores + size, experts + i * route.chosen, shares + i * route.chosen);
    }
  });
}

void SumRows::run() const {
  const int64_t item = item_bytes(dtype), rows = x.count / each;
  auto at = [item](const Rows& r, int64_t i) -> const void* {
    return r.data == nullptr ? nullptr : static_cast<const char*>(r.data) + i * r.stride * item;
  };
  const auto grain = static_cast<size_t>(std::max<int64_t>(1, kPieceElements / (x.size * each)));
  parallel_for(static_cast<size_t>(rows), grain, [&](size_t begin, size_t end) {
    static thread_local Scratch scratch;
    float* weights = scratch.floats(each);
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      for (int64_t j = 0; j < each; ++j) {
        weights[j] = shares == nullptr ? factor : factor * shares[i * each + j];
      }
      if (gate.data != nullptr) {
        float value = 0.0f;
        mixture_kernels().widen[static_cast<int>(dtype)](at(gate, i), &value, 1);
        weights[0] = factor / (1.0f + std::exp(-value));
      }
      void* y = static_cast<char*>(out) + i * out_stride * item;
      mixture_kernels().sum[static_cast<int>(dtype)](at(x, i * each), x.stride, weights, each, at(onto, i), y, x.size);
    }
  });
}

void GateRows::run() const {
  const int64_t item = item_bytes(dtype), size = x.size / parts;
  auto kernel = mixture_kernels().gate[static_cast<int>(dtype)][static_cast<int>(unit)];
  const auto grain = static_cast<size_t>(std::max<int64_t>(1, kPieceElements / x.size));
  parallel_for(static_cast<size_t>(x.count), grain, [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      for (int64_t part = 0; part < parts && (experts == nullptr || experts[i] >= 0); ++part) {
        kernel(
            static_cast<const char*>(gate.data) + (i * gate.stride + part * gate_step) * item,
            static_cast<const char*>(x.data) + (i * x.stride + part * size) * item, alpha, limit,
            static_cast<char*>(out) + (i * out_stride + part * size) * item, size);
      }
    }
  });
}

} // namespace mlxinfer::cpu
