// Attention over pages against double precision: prompts in chunks and single tokens, of several sequences at once.

#include <algorithm>
#include <limits>

#include "attention/work.h"
#include "check.h"

namespace mlxinfer::cpu::check {
namespace {

struct Setting {
  int64_t kv_heads, heads_per_kv, key_dim, value_dim;
  std::optional<int64_t> window;
  float softcap;
  Float rows, pages;
};

// The values that `to` makes of `from`.
std::vector<double> rounded(const Floats& from, Float to) {
  Floats kept(to, from.size());
  std::vector<double> values;
  for (int64_t i = 0; i < from.size(); ++i) {
    kept.set(i, static_cast<float>(from[i]));
    values.push_back(kept[i]);
  }
  return values;
}

// Everything one sequence ever sees, [tokens][heads][dim] each, and what its pages keep of it.
struct History {
  Floats queries, keys, values;
  std::vector<double> kept_keys, kept_values;
  History(const Setting& s, int64_t tokens, Random& random)
      : queries(Floats::normal(s.rows, tokens * s.kv_heads * s.heads_per_kv * s.key_dim, random)),
        keys(Floats::normal(s.rows, tokens * s.kv_heads * s.key_dim, random)),
        values(Floats::normal(s.rows, tokens * s.kv_heads * s.value_dim, random)),
        kept_keys(rounded(keys, s.pages)),
        kept_values(rounded(values, s.pages)) {}
};

constexpr float kScale = 0.2f;

// One query head's answer, in double precision.
std::vector<double> wanted(const Setting& s, const History& h, int64_t token, int64_t head) {
  const int64_t kv = head / s.heads_per_kv, first = std::max<int64_t>(token + 1 - s.window.value_or(token + 1), 0);
  std::vector<double> scores, out(static_cast<size_t>(s.value_dim), 0.0);
  double most = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t t = first; t <= token; ++t) {
    double score = 0;
    for (int64_t d = 0; d < s.key_dim; ++d) {
      const double query = h.queries[(token * s.kv_heads * s.heads_per_kv + head) * s.key_dim + d];
      score += query * h.kept_keys[static_cast<size_t>((t * s.kv_heads + kv) * s.key_dim + d)];
    }
    score *= kScale;
    scores.push_back(s.softcap == 0 ? score : s.softcap * std::tanh(score / s.softcap));
    most = std::max(most, scores.back());
  }
  for (int64_t t = first; t <= token; ++t) {
    const double weight = std::exp(scores[static_cast<size_t>(t - first)] - most);
    sum += weight;
    for (int64_t d = 0; d < s.value_dim; ++d) {
      out[static_cast<size_t>(d)] += weight * h.kept_values[static_cast<size_t>((t * s.kv_heads + kv) * s.value_dim + d)];
    }
  }
  for (auto& value : out) {
    value /= sum;
  }
  return out;
}

// Sequences in their cache: sealed pages under rising numbers, an open page each.
class Cache {
 public:
  Cache(const Setting& setting, std::vector<History>& histories, int64_t pages)
      : s_(setting),
        histories_(histories),
        pages_(pages),
        sealed_{empty(pages, s_.key_dim), empty(pages, s_.value_dim)},
        open_{empty(slots(), s_.key_dim), empty(slots(), s_.value_dim)},
        done_(histories.size(), 0),
        tables_(histories.size()) {}

  // As many new tokens of each sequence as `counts` says.
  void step(const std::vector<int64_t>& counts) {
    std::vector<AttentionPlan::Row> segments;
    int64_t rows = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) {
        segments.emplace_back(static_cast<int64_t>(i), rows, counts[i], done_[i], 0, tables_[i]);
        rows += counts[i];
      }
    }
    const auto plan = std::make_shared<AttentionPlan>(segments, s_.window);
    const Floats full[2] = {empty(plan->full_pages, s_.key_dim), empty(plan->full_pages, s_.value_dim)};
    Floats queries = gather(counts, &History::queries, rows, s_.kv_heads * s_.heads_per_kv * s_.key_dim);
    Floats keys = gather(counts, &History::keys, rows, s_.kv_heads * s_.key_dim);
    Floats values = gather(counts, &History::values, rows, s_.kv_heads * s_.value_dim);
    Floats out(s_.rows, rows * s_.kv_heads * s_.heads_per_kv * s_.value_dim);
    AttentionWork work{};
    work.plan = plan;
    work.keys = store(0, s_.key_dim, full[0], *plan);
    work.values = store(1, s_.value_dim, full[1], *plan);
    work.queries = heads(queries, s_.kv_heads * s_.heads_per_kv, s_.key_dim);
    work.new_keys = heads(keys, s_.kv_heads, s_.key_dim);
    work.new_values = heads(values, s_.kv_heads, s_.value_dim);
    work.heads_per_kv = s_.heads_per_kv;
    work.scale = kScale;
    work.softcap = s_.softcap;
    work.out = out.data();
    work.out_item_size = out.item();
    work.run();
    compare(out, counts);
    seal(full, *plan);
    for (size_t i = 0; i < counts.size(); ++i) {
      done_[i] += counts[i];
    }
  }

 private:
  Floats empty(int64_t pages, int64_t dim) const {
    return Floats(s_.pages, s_.kv_heads * pages * kPageTokens * dim);
  }

  int64_t slots() const {
    return static_cast<int64_t>(histories_.size());
  }

  Floats gather(const std::vector<int64_t>& counts, Floats History::*part, int64_t rows, int64_t width) const {
    Floats all(s_.rows, rows * width);
    int64_t to = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      for (int64_t at = done_[i] * width; at < (done_[i] + counts[i]) * width; ++at) {
        all.set(to++, static_cast<float>((histories_[i].*part)[at]));
      }
    }
    return all;
  }

  static Heads heads(const Floats& rows, int64_t count, int64_t dim) {
    return {rows.data(), count * dim * rows.item(), dim * rows.item(), dim, static_cast<int>(rows.dtype())};
  }

  PageStore store(int which, int64_t dim, const Floats& full, const AttentionPlan& plan) const {
    const int dtype = static_cast<int>(s_.pages);
    return {sealed_[which].data(), open_[which].data(), full.data(), pages_, plan.full_pages, s_.kv_heads, dim, full.item(), dtype};
  }

  void compare(const Floats& out, const std::vector<int64_t>& counts) const {
    const int64_t heads = s_.kv_heads * s_.heads_per_kv;
    const double tolerance = s_.rows == Float::f32 ? 3e-5 : 2 * kUnit[static_cast<int>(s_.rows)];
    int64_t row = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      for (int64_t t = done_[i]; t < done_[i] + counts[i]; ++t, ++row) {
        for (int64_t head = 0; head < heads; ++head) {
          const auto want = wanted(s_, histories_[i], t, head);
          for (int64_t d = 0; d < s_.value_dim; ++d) {
            const double value = want[static_cast<size_t>(d)];
            expect_within(out[(row * heads + head) * s_.value_dim + d] - value, tolerance * (1 + std::abs(value)), "attention");
          }
        }
      }
    }
  }

  void seal(const Floats (&full)[2], const AttentionPlan& plan) {
    for (const auto& segment : plan.segments) {
      for (int64_t i = 0; i < segment.filled(); ++i) {
        for (int which = 0; which < 2; ++which) {
          const int64_t size = kPageTokens * (which == 0 ? s_.key_dim : s_.value_dim) * full[which].item();
          for (int64_t head = 0; head < s_.kv_heads; ++head) {
            std::copy_n(full[which].data() + (head * plan.full_pages + segment.full_page + i) * size, size,
                        sealed_[which].data() + (head * pages_ + next_page_) * size);
          }
        }
        tables_[static_cast<size_t>(segment.slot)].push_back(static_cast<int32_t>(next_page_++));
      }
    }
  }

  const Setting s_;
  const std::vector<History>& histories_;
  const int64_t pages_;
  Floats sealed_[2], open_[2];
  std::vector<int64_t> done_;
  std::vector<std::vector<int32_t>> tables_;
  int64_t next_page_ = 0;
};

} // namespace

void attention() {
  Random random(5);
  const Setting settings[] = {
      {1, 3, 64, 64, std::nullopt, 0, Float::f32, Float::f32},  {2, 1, 24, 40, 70, 0, Float::f32, Float::bf16},
      {1, 8, 80, 17, std::nullopt, 30, Float::f16, Float::f16}, {2, 2, 32, 64, 10, 5, Float::bf16, Float::f32},
      {3, 1, 7, 1, std::nullopt, 0, Float::bf16, Float::bf16},
  };
  for (const Setting& setting : settings) {
    std::vector<History> histories;
    for (int i = 0; i < 2; ++i) {
      histories.emplace_back(setting, 340, random);
    }
    Cache cache(setting, histories, 12);
    for (const auto& counts : {std::vector<int64_t>{100, 3}, {28, 0}, {1, 1}, {1, 200}, {200, 1}, {1, 1}}) {
      cache.step(counts);
    }
  }
}

} // namespace mlxinfer::cpu::check
