#pragma once

// What the checks share: arrays in any float dtype, random numbers, and how a failure is told.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "matmul/convert.h"
#include "op/rows.h"

namespace mlxinfer::cpu::check {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

inline void expect(bool holds, const std::string& what) {
  if (!holds) {
    fail(what);
  }
}

// `off` of at most `allowed`; NaN is off.
inline void expect_within(double off, double allowed, const std::string& what) {
  if (!(std::abs(off) <= allowed)) {
    fail(what + ": off by " + std::to_string(std::abs(off) / allowed) + " times what is allowed");
  }
}

using Random = std::mt19937_64;

inline int64_t between(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

constexpr double kUnit[kFloats] = {0x1p-24, 0x1p-8, 0x1p-11}; // half the distance of neighbouring floats, relative to them

// Floats in one dtype, in memory of exactly their size, so that a sanitizer sees what is read beyond them.
class Floats {
 public:
  Floats(Float dtype, int64_t size) : dtype_(dtype), size_(size), memory_(new char[static_cast<size_t>(size * item())]()) {}

  static Floats normal(Float dtype, int64_t size, Random& random, float scale = 1.0f) {
    std::normal_distribution<float> distribution(0.0f, scale);
    Floats floats(dtype, size);
    for (int64_t i = 0; i < size; ++i) {
      floats.set(i, distribution(random));
    }
    return floats;
  }

  Float dtype() const {
    return dtype_;
  }
  int64_t size() const {
    return size_;
  }
  int64_t item() const {
    return dtype_ == Float::f32 ? 4 : 2;
  }
  char* data() const {
    return memory_.get();
  }
  double operator[](int64_t i) const {
    if (dtype_ == Float::f32) {
      return reinterpret_cast<const float*>(data())[i];
    }
    const uint16_t bits = reinterpret_cast<const uint16_t*>(data())[i];
    return dtype_ == Float::bf16 ? bfloat_to_float(bits) : half_to_float(bits);
  }
  void set(int64_t i, float value) {
    if (dtype_ == Float::f32) {
      reinterpret_cast<float*>(data())[i] = value;
    } else {
      reinterpret_cast<uint16_t*>(data())[i] = dtype_ == Float::bf16 ? float_to_bfloat(value) : float_to_half(value);
    }
  }

 private:
  Float dtype_;
  int64_t size_;
  std::unique_ptr<char[]> memory_;
};

// The checks, one file each.
void pool(int rounds, bool may_fork);
void floats();
void products();
void attention();
void recurrent();
void together(int rounds);

} // namespace mlxinfer::cpu::check
