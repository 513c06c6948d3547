// Conversions of every 16-bit float, and the kernels that work row by row.

#include <bit>

#include "attention/head.h"
#include "check.h"
#include "elementwise/silu_multiply.h"
#include "norm/rms_norm.h"

namespace mlxinfer::cpu::check {
namespace {

constexpr Float kAll[] = {Float::f32, Float::bf16, Float::f16};

uint32_t bits_of(double value) {
  return std::bit_cast<uint32_t>(static_cast<float>(value));
}

void widening() {
  std::vector<uint16_t> every(65536);
  for (size_t i = 0; i < every.size(); ++i) {
    every[i] = static_cast<uint16_t>(i);
  }
  std::vector<float> wide(every.size());
  for (Float dtype : {Float::bf16, Float::f16}) {
    head_kernels().convert[static_cast<int>(dtype)][0](every.data(), static_cast<int64_t>(every.size()), wide.data());
    for (size_t i = 0; i < every.size(); ++i) {
      const float want = dtype == Float::bf16 ? bfloat_to_float(every[i]) : half_to_float(every[i]);
      const bool same = std::isnan(want) ? std::isnan(wide[i]) : std::bit_cast<uint32_t>(wide[i]) == std::bit_cast<uint32_t>(want);
      expect(same, "16-bit float " + std::to_string(i) + " to 32 bits");
    }
  }
}

void narrowing() {
  Random random(1);
  std::vector<float> wide(200000);
  for (auto& value : wide) {
    value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (random() % 2 == 0) { // most of all bit patterns are beyond halves
      value = half_to_float(static_cast<uint16_t>(random())) * (1.0f + static_cast<float>(random() % 5) * 0x1p-12f);
    }
  }
  std::vector<uint16_t> narrow(wide.size());
  for (Float dtype : {Float::bf16, Float::f16}) {
    head_kernels().convert[0][static_cast<int>(dtype)](wide.data(), static_cast<int64_t>(wide.size()), narrow.data());
    for (size_t i = 0; i < wide.size(); ++i) {
      const uint16_t want = dtype == Float::bf16 ? float_to_bfloat(wide[i]) : float_to_half(wide[i]);
      const float got = dtype == Float::bf16 ? bfloat_to_float(narrow[i]) : half_to_float(narrow[i]);
      expect(std::isnan(wide[i]) ? std::isnan(got) : narrow[i] == want, "a float to 16 bits: " + std::to_string(bits_of(wide[i])));
    }
  }
}

void norms(Float dtype, int64_t size, Random& random) {
  auto x = Floats::normal(dtype, size, random), weight = Floats::normal(dtype, size, random), onto = Floats::normal(dtype, size, random);
  Floats out(dtype, size);
  rms_norm_kernels().row[static_cast<int>(dtype)](x.data(), weight.data(), 1e-3f, onto.data(), out.data(), size);
  double squares = 0;
  for (int64_t i = 0; i < size; ++i) {
    squares += x[i] * x[i];
  }
  for (int64_t i = 0; i < size; ++i) {
    const double product = x[i] / std::sqrt(squares / static_cast<double>(size) + 1e-3) * weight[i], want = product + onto[i];
    const double rounding = 1e-5 * std::abs(product) + 1e-7 * std::abs(want) + 1.01 * kUnit[static_cast<int>(dtype)] * std::abs(want);
    expect_within(out[i] - want, rounding + 0x1p-25, "rms_norm of " + std::to_string(size));
  }
}

void gates(Float dtype, int64_t size, Random& random) {
  auto gate = Floats::normal(dtype, size, random, 10.0f), up = Floats::normal(dtype, size, random);
  Floats out(dtype, size);
  silu_multiply_kernels().row[static_cast<int>(dtype)](gate.data(), up.data(), out.data(), size);
  for (int64_t i = 0; i < size; ++i) {
    const double want = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    const double rounding = (1e-6 * (1 + std::abs(gate[i])) + 1.01 * kUnit[static_cast<int>(dtype)]) * std::abs(want);
    expect_within(out[i] - want, rounding + 0x1p-25, "silu_multiply of " + std::to_string(size));
  }
}

} // namespace

void floats() {
  widening();
  narrowing();
  Random random(2);
  for (Float dtype : kAll) {
    for (int64_t size : {1, 3, 4, 7, 8, 15, 16, 17, 31, 64, 65, 200, 576}) {
      norms(dtype, size, random);
      gates(dtype, size, random);
    }
  }
}

} // namespace mlxinfer::cpu::check
