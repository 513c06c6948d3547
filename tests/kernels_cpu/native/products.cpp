// Packed products of every format, precision and number of rows against double precision.

#include <algorithm>
#include <cstring>
#include <thread>

#include "check.h"
#include "matmul/multiply.h"
#include "matmul/pack.h"
#include "matmul/rows.h"

namespace mlxinfer::cpu::check {
namespace {

struct Format {
  Code code;
  int group;
  Scale scale;
};

constexpr Format kFormats[] = {
    {Code::affine1, 64, Scale::bf16}, {Code::affine2, 32, Scale::f16}, {Code::affine3, 64, Scale::f32},
    {Code::affine4, 32, Scale::f16},  {Code::affine4, 128, Scale::bf16}, {Code::affine5, 64, Scale::f16},
    {Code::affine6, 32, Scale::f32},  {Code::affine8, 64, Scale::f16}, {Code::affine8, 32, Scale::bf16},
    {Code::mxfp4, 32, Scale::e8m0},   {Code::nvfp4, 16, Scale::e4m3},  {Code::mxfp8, 32, Scale::e8m0},
    {Code::f32, 32, Scale::none},    {Code::bf16, 32, Scale::none},  {Code::f16, 32, Scale::none},
};

double e4m3(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude = exponent == 0 ? fraction * 0x1p-9 : std::ldexp(8 + fraction, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

double e2m1(int code) {
  const int exponent = code >> 1 & 3, fraction = code & 1;
  const double magnitude = exponent == 0 ? fraction * 0.5 : std::ldexp(2 + fraction, exponent - 2);
  return code & 8 ? -magnitude : magnitude;
}

Float float_of(Scale scale) {
  return scale == Scale::f32 ? Float::f32 : scale == Scale::bf16 ? Float::bf16 : Float::f16;
}

// Matrices as they come and packed, their values, and the sizes of what is added up for each weight.
struct Weights {
  Layout layout;
  int64_t count;
  std::vector<double> values, sizes; // [count][n][k]
  std::vector<uint8_t> packed;

  Weights(const Format& f, int64_t matrices, int64_t n, int64_t k, Random& random)
      : layout{f.code, f.scale, f.group, 0, n, k}, count(matrices) {
    const int64_t rows = count * n;
    values.resize(static_cast<size_t>(rows * k));
    sizes = values;
    packed.resize(static_cast<size_t>(count * layout.panels() * layout.panel_bytes()));
    if (layout.is_plain()) {
      const Float dtype = f.code == Code::f32 ? Float::f32 : f.code == Code::bf16 ? Float::bf16 : Float::f16;
      const auto floats = Floats::normal(dtype, rows * k, random);
      for (int64_t i = 0; i < rows * k; ++i) {
        values[static_cast<size_t>(i)] = floats[i];
        sizes[static_cast<size_t>(i)] = std::abs(floats[i]);
      }
      pack(layout, f.scale, count, {floats.data(), nullptr, nullptr}, packed.data());
      return;
    }
    const auto codes = draw_codes(f, rows * k, random);
    if (layout.is_affine()) {
      pack_affine(f, codes, random);
    } else {
      pack_with_bytes(f, codes, random);
    }
  }

 private:
  static std::vector<uint8_t> draw_codes(const Format& f, int64_t size, Random& random) {
    std::vector<uint8_t> codes(static_cast<size_t>(size));
    for (auto& code : codes) {
      do {
        code = static_cast<uint8_t>(between(random, 0, (1 << code_bits(f.code)) - 1));
      } while (f.code == Code::mxfp8 && (code & 0x7f) == 0x7f); // NaN
    }
    return codes;
  }

  // Codes one behind the other from the lowest bit on.
  std::vector<uint8_t> stream(const std::vector<uint8_t>& codes) const {
    std::vector<uint8_t> bytes(codes.size() * static_cast<size_t>(layout.bits()) / 8, 0);
    for (size_t i = 0; i < codes.size() * static_cast<size_t>(layout.bits()); ++i) {
      const size_t code = i / static_cast<size_t>(layout.bits()), bit = i % static_cast<size_t>(layout.bits());
      bytes[i / 8] = static_cast<uint8_t>(bytes[i / 8] | (codes[code] >> bit & 1) << i % 8);
    }
    return bytes;
  }

  void pack_affine(const Format& f, const std::vector<uint8_t>& codes, Random& random) {
    const auto groups = static_cast<int64_t>(codes.size()) / f.group;
    const auto scales = Floats::normal(float_of(f.scale), groups, random), biases = Floats::normal(float_of(f.scale), groups, random);
    for (size_t i = 0; i < codes.size(); ++i) {
      const int64_t group = static_cast<int64_t>(i) / f.group;
      values[i] = scales[group] * codes[i] + biases[group];
      sizes[i] = std::abs(scales[group] * codes[i]) + std::abs(biases[group]);
    }
    pack(layout, f.scale, count, {stream(codes).data(), scales.data(), biases.data()}, packed.data());
  }

  void pack_with_bytes(const Format& f, const std::vector<uint8_t>& codes, Random& random) {
    std::vector<uint8_t> scales(codes.size() / static_cast<size_t>(f.group));
    for (auto& scale : scales) {
      scale = static_cast<uint8_t>(f.scale == Scale::e8m0 ? between(random, 120, 127) : between(random, 0, 80)); // within halves
    }
    for (size_t i = 0; i < codes.size(); ++i) {
      const uint8_t scale = scales[i / static_cast<size_t>(f.group)];
      values[i] = (f.scale == Scale::e8m0 ? std::ldexp(1.0, scale - 127) : e4m3(scale)) * (layout.bits() == 8 ? e4m3(codes[i]) : e2m1(codes[i]));
      sizes[i] = std::abs(values[i]);
    }
    pack(layout, f.scale, count, {stream(codes).data(), scales.data(), nullptr}, packed.data());
  }
};

std::string text(const Format& f, Precision precision, int64_t rows) {
  return "format " + std::to_string(static_cast<int>(f.code)) + "/" + std::to_string(f.group) + ", precision " +
      std::to_string(static_cast<int>(precision)) + ", " + std::to_string(rows) + " rows";
}

struct Inputs {
  Floats x, bias, residual;
  std::vector<int32_t> experts;
  int64_t rows;

  Inputs(const Weights& w, Float dtype, int64_t count, Random& random)
      : x(Floats::normal(dtype, count * w.layout.k, random)),
        bias(Floats::normal(dtype, w.count * w.layout.n, random)),
        residual(Floats::normal(dtype, count * w.layout.n, random)),
        rows(count) {
    for (int64_t i = 0; w.count > 1 && i < rows; ++i) {
      experts.push_back(static_cast<int32_t>(between(random, 0, w.count - 1)));
    }
  }

  Floats multiply_by(const Weights& w, Precision precision, int64_t first, int64_t count) const {
    const int64_t n = w.layout.n, k = w.layout.k;
    Floats y(x.dtype(), count * n);
    Product p{};
    p.layout = w.layout;
    p.weights = w.packed.data();
    p.precision = precision;
    p.dtype = x.dtype();
    p.x = {x.data() + first * k * x.item(), count, k, k};
    p.rows = count;
    p.x_repeats = 1;
    p.experts = experts.empty() ? nullptr : experts.data() + first;
    p.expert_count = w.count;
    p.bias = bias.data();
    p.residual = {residual.data() + first * n * x.item(), count, n, n};
    p.y = y.data();
    multiply(p);
    return y;
  }
};

// What rounding may take the product of a row and a weight's row off by.
double allowed(const Weights& w, const Inputs& in, Precision precision, int64_t row, int64_t weight_row, double want) {
  const int64_t k = w.layout.k;
  const double limit = precision == Precision::int8 ? 127 : 127 * 128;
  double error = 0, sizes = 0;
  for (int64_t block = 0; block < k; block += kBlockColumns) {
    double most = 0, weights = 0;
    for (int64_t c = block; c < std::min<int64_t>(block + kBlockColumns, k); ++c) {
      const auto at = static_cast<size_t>(weight_row * k + c);
      most = std::max(most, std::abs(in.x[row * k + c]));
      weights += std::abs(w.values[at]);
      sizes += std::abs(in.x[row * k + c]) * w.sizes[at];
    }
    error += precision != Precision::f32 && w.layout.has_integers() ? 0.505 * most / limit * weights : 0;
  }
  error += static_cast<double>(40 + 3 * w.layout.blocks()) * 0x1p-24 * sizes;
  return error + 1.01 * (kUnit[static_cast<int>(in.x.dtype())] + 0x1p-23) * std::abs(want) + 0x1p-22;
}

void compare(const Format& f, const Weights& w, const Inputs& in, Precision precision) {
  const int64_t n = w.layout.n, k = w.layout.k;
  const std::string what = text(f, precision, in.rows);
  const Floats y = in.multiply_by(w, precision, 0, in.rows);
  for (int64_t row = 0; row < in.rows; ++row) {
    const int64_t expert = in.experts.empty() ? 0 : in.experts[static_cast<size_t>(row)];
    for (int64_t j = 0; j < n; ++j) {
      double want = in.bias[expert * n + j] + in.residual[row * n + j];
      for (int64_t c = 0; c < k; ++c) {
        want += in.x[row * k + c] * w.values[static_cast<size_t>((expert * n + j) * k + c)];
      }
      expect_within(y[row * n + j] - want, allowed(w, in, precision, row, expert * n + j, want), what);
    }
    const Floats alone = in.multiply_by(w, precision, row, 1);
    const auto bytes = static_cast<size_t>(n * y.item());
    expect(std::memcmp(alone.data(), y.data() + row * n * y.item(), bytes) == 0, what + ": bits differ from those of one row");
  }
}

void compare_rows(const Format& f, const Weights& w) {
  const std::string what = text(f, Precision::f32, 0);
  std::vector<float> row(static_cast<size_t>(w.layout.k));
  for (int64_t i = 0; i < w.layout.n; ++i) {
    read_row(w.layout, w.packed.data(), i, row.data());
    for (int64_t c = 0; c < w.layout.k; ++c) {
      const auto at = static_cast<size_t>(i * w.layout.k + c);
      expect_within(row[static_cast<size_t>(c)] - w.values[at], 0x1p-23 * std::abs(w.values[at]), what);
    }
  }
}

constexpr Precision kPrecisions[] = {Precision::f32, Precision::int16, Precision::int8};

} // namespace

void products() {
  Random random(3);
  for (const Format& f : kFormats) {
    const int64_t k = f.scale == Scale::none ? 101 : 128, n = between(random, 17, 40);
    const Weights one(f, 1, n, k, random), several(f, 3, n, k, random);
    compare_rows(f, one);
    for (Precision precision : kPrecisions) {
      compare(f, one, Inputs(one, Float::f32, 31, random), precision); // a tile of every size
      compare(f, one, Inputs(one, static_cast<Float>(between(random, 1, 2)), 3, random), precision);
      compare(f, several, Inputs(several, Float::f32, 12, random), precision);
    }
  }
}

void together(int rounds) {
  Random random(4);
  const Format& f = kFormats[3];
  const Weights w(f, 1, 100, 256, random);
  const Inputs in(w, Float::f32, 20, random);
  const Floats want = in.multiply_by(w, Precision::int8, 0, in.rows);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20 * rounds; ++round) {
        const Floats y = in.multiply_by(w, Precision::int8, 0, in.rows);
        expect(std::memcmp(y.data(), want.data(), static_cast<size_t>(y.size() * y.item())) == 0, "products of several threads at once");
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

} // namespace mlxinfer::cpu::check
