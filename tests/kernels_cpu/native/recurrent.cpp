// Recurrent layers, routers and sums: rows of several sequences together give the bits that each token alone gives, with states written
// where they lie. The arrays have exactly their size, for sanitizers; tests/kernels_cpu compares with double precision.

#include <cstring>
#include <functional>

#include "check.h"
#include "mixture/rows.h"
#include "recurrent/work.h"

namespace mlxinfer::cpu::check {
namespace {

using Memory = std::vector<float>;

Memory normal(Random& random, int64_t size) {
  std::normal_distribution<float> distribution;
  Memory memory(static_cast<size_t>(size));
  for (float& x : memory) {
    x = distribution(random);
  }
  return memory;
}

std::shared_ptr<const Stretches> stretches(const std::vector<int64_t>& counts) {
  auto made = std::make_shared<Stretches>();
  for (int64_t count : counts) {
    made->all.push_back({made->rows, count});
    made->rows += count;
  }
  return made;
}

struct Sizes {
  int64_t width, channels, state, out; // of a row, of the window, of a sequence's state, and of a result in bytes
  int64_t taps;
};

// Some rows of some sequences: where they are, their states before and after, and where results go.
struct Part {
  std::shared_ptr<const Stretches> rows;
  const char* x;
  float *window_from, *window_to, *state;
  char* out;
};

void compare(Random& random, const Sizes& s, Float dtype, const std::function<void(const Part&)>& run, const std::string& what) {
  const std::vector<int64_t> counts{1, between(random, 60, 70), 3};
  const auto whole = stretches(counts);
  const int64_t kept = (s.taps - 1) * s.channels, sequences = 3;
  const auto x = Floats::normal(dtype, whole->rows * s.width, random);
  Memory window = normal(random, sequences * kept), state = normal(random, sequences * s.state), after(window.size());
  Memory alone = window, alone_state = state, next(static_cast<size_t>(kept));
  std::vector<char> together(static_cast<size_t>(whole->rows * s.out)), one(together.size());
  run({whole, x.data(), window.data(), after.data(), state.data(), together.data()});
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    for (int64_t row = whole->all[i].start; row < whole->all[i].start + counts[i]; ++row) {
      float* own = alone.data() + n * kept;
      run({stretches({1}), x.data() + row * s.width * x.item(), own, next.data(), alone_state.data() + n * s.state, one.data() + row * s.out});
      std::copy(next.begin(), next.end(), own);
    }
  }
  expect(together == one, what + ": rows differ");
  expect(after == alone && state == alone_state, what + ": states differ");
  for (float value : state) {
    expect(std::isfinite(value), what + ": a state is not finite");
  }
}

void delta(Random& random, Float dtype) {
  const int64_t key_heads = between(random, 1, 3), value_heads = key_heads * between(random, 1, 3), keys = between(random, 1, 40);
  const int64_t values = between(random, 1, 40), taps = between(random, 2, 4), channels = 2 * key_heads * keys + value_heads * values;
  const int64_t decays = between(random, 0, 1) == 0 ? 1 : keys, rates = value_heads * decays;
  const int64_t width = channels + value_heads + rates, item = item_bytes(dtype);
  const Memory weights = normal(random, taps * channels), decay = normal(random, rates), bias = normal(random, rates);
  compare(random, {width, channels, value_heads * values * keys, value_heads * values * 4, taps}, dtype, [&](const Part& p) {
    auto columns = [&](int64_t first, int64_t count) { return Rows{p.x + first * item, p.rows->rows, count, width}; };
    const Convolution convolution{weights.data(), nullptr, channels, taps, p.window_from, p.window_to};
    DeltaWork{p.rows, key_heads, value_heads, keys, values, decays, convolution, decay.data(), bias.data(), p.state, p.state, columns(0, channels),
              columns(channels, value_heads), columns(channels + value_heads, rates), dtype, reinterpret_cast<float*>(p.out)}
        .run();
  }, "a gated delta net");
}

void mamba(Random& random, Float dtype) {
  const int64_t groups = between(random, 1, 3), heads = groups * between(random, 1, 9), dim = between(random, 1, 20), size = between(random, 1, 40);
  const int64_t taps = between(random, 2, 4), channels = heads * dim + 2 * groups * size, width = channels + heads, item = item_bytes(dtype);
  const Memory weights = normal(random, taps * channels), bias = normal(random, channels), vectors = normal(random, 3 * heads);
  compare(random, {width, channels, heads * dim * size, heads * dim * 4, taps}, dtype, [&](const Part& p) {
    const Convolution convolution{weights.data(), bias.data(), channels, taps, p.window_from, p.window_to};
    MambaWork{p.rows, heads, dim, size, groups, convolution, vectors.data(), vectors.data() + heads, vectors.data() + 2 * heads, 0.0f, 10.0f, p.state,
              p.state, Rows{p.x, p.rows->rows, channels, width}, Rows{p.x + channels * item, p.rows->rows, heads, width}, dtype,
              reinterpret_cast<float*>(p.out)}
        .run();
  }, "a Mamba layer");
}

void short_convolution(Random& random, Float dtype) {
  const int64_t channels = between(random, 1, 1100), taps = between(random, 2, 4), item = item_bytes(dtype);
  const Memory weights = normal(random, taps * channels);
  compare(random, {3 * channels, channels, 0, channels * item, taps}, dtype, [&](const Part& p) {
    auto columns = [&](int64_t part) { return Rows{p.x + part * channels * item, p.rows->rows, channels, 3 * channels}; };
    ShortConvWork{p.rows, {weights.data(), nullptr, channels, taps, p.window_from, p.window_to}, columns(0), columns(1), columns(2), dtype, p.out}.run();
  }, "a short convolution");
}

// Each row's experts are different ones, and its shares add up to one.
void routes(Random& random, Float dtype) {
  const int64_t groups = between(random, 1, 4), each = between(random, 1, 9), experts = groups * each, kept = between(random, 1, groups);
  const int64_t chosen = between(random, 1, kept * each), rows = between(random, 1, 40);
  const auto logits = Floats::normal(dtype, rows * experts, random);
  std::vector<int32_t> best(static_cast<size_t>(rows * chosen));
  Memory shares(best.size());
  const Route route{static_cast<Scores>(between(random, 0, 2)), experts, chosen, true, 0.0f, 0.0f, 1.0f, groups, kept, 2};
  const Memory gains(static_cast<size_t>(experts), 1.0f);
  RouteRows{route, nullptr, gains.data(), {logits.data(), rows, experts, experts}, dtype, best.data(), shares.data()}.run();
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0.0;
    for (int64_t i = row * chosen; i < (row + 1) * chosen; ++i) {
      sum += shares[static_cast<size_t>(i)];
      for (int64_t j = row * chosen; j < i; ++j) {
        expect(best[static_cast<size_t>(i)] != best[static_cast<size_t>(j)], "an expert is chosen twice");
      }
    }
    expect_within(sum - 1.0, 1e-5, "the sum of shares");
  }
}

} // namespace

void recurrent() {
  Random random(5);
  for (int round = 0; round < 6; ++round) {
    for (Float dtype : {Float::f32, Float::bf16, Float::f16}) {
      delta(random, dtype);
      mamba(random, dtype);
      short_convolution(random, dtype);
      routes(random, dtype);
    }
  }
}

} // namespace mlxinfer::cpu::check
