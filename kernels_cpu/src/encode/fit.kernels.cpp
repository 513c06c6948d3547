#include "encode/fit.h"

#include "simd/floats.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr float kShrunken[] = {1.0f, 0.94f, 0.88f, 0.82f, 0.75f, 0.66f}; // ranges to start from, as shares of the group's own
constexpr int kRounds = 3;
constexpr int kLastRounds = 6; // for the best of all

struct Pair {
  float scale, bias;
};

MLXINFER_INLINE float magnitude(float x) {
  return x < 0 ? -x : x;
}

// To the nearest whole number, ties to even; exact below 2^22.
MLXINFER_INLINE F32 nearest(F32 v) {
  return (v + 12582912.0f) - 12582912.0f;
}

struct Group {
  const float* x;
  const float* importance;
  int size;
  float top; // the highest code
  Stored stored;

  MLXINFER_INLINE F32 codes(int at, Pair p) const {
    const F32 steps = (load(x + at) - p.bias) / p.scale;
    return nearest(min(max(steps, F32{}), broadcast(top)));
  }

  float as_stored(float v) const {
    switch (stored) {
      case Stored::bfloat16:
        return from_bfloat(to_bfloat(broadcast(v)))[0];
      case Stored::float16:
        return from_half(to_half(broadcast(v)))[0];
      default:
        return v;
    }
  }

  Pair as_stored(Pair p) const {
    return {as_stored(p.scale), as_stored(p.bias)};
  }

  float error(Pair p) const {
    F32 sum = {};
    for (int at = 0; at < size; at += kWidth) {
      const F32 difference = codes(at, p) * p.scale + p.bias - load(x + at);
      sum += load(importance + at) * difference * difference;
    }
    return sum_across(sum);
  }

  // Least squares for the codes of this pair; false where they say nothing about a scale.
  bool refine(Pair& p, float total, float total_x) const {
    F32 first = {}, second = {}, product = {};
    for (int at = 0; at < size; at += kWidth) {
      const F32 code = codes(at, p), weighted = load(importance + at) * code;
      first += weighted;
      second += weighted * code;
      product += weighted * load(x + at);
    }
    const float f = sum_across(first), s = sum_across(second), determinant = total * s - f * f;
    if (!(determinant > 1e-6f * total * s)) {
      return false;
    }
    const float scale = (total * sum_across(product) - f * total_x) / determinant;
    if (!(magnitude(scale) > 1e-9f)) {
      return false;
    }
    p = {scale, (total_x - scale * f) / total};
    return true;
  }
};

// As `mx.quantize` chooses them: the extreme farther from zero, and zero itself, are exact.
Pair of_range(float low, float high, float top) {
  const bool from_low = magnitude(low) > magnitude(high);
  float scale = (high - low) / top;
  scale = scale > 1e-7f ? scale : 1e-7f;
  scale = from_low ? scale : -scale;
  const float edge = from_low ? low : high, steps = nearest(broadcast(edge / scale))[0];
  return steps != 0 ? Pair{edge / steps, edge} : Pair{scale, 0};
}

void group(const float* x, const float* importance, int size, int bits, Stored stored, uint8_t* codes, float* scale, float* bias) {
  const Group g{x, importance, size, static_cast<float>((1 << bits) - 1), stored};
  F32 lowest = load(x), highest = lowest, total_v = {}, total_xv = {};
  for (int at = 0; at < size; at += kWidth) {
    const F32 v = load(x + at), w = load(importance + at);
    lowest = min(lowest, v);
    highest = max(highest, v);
    total_v += w;
    total_xv += w * v;
  }
  const float low = -max_across(-lowest), high = max_across(highest), total = sum_across(total_v), total_x = sum_across(total_xv);
  const float middle = (high + low) / 2, half = (high - low) / 2;
  const Pair range = of_range(low, high, g.top);
  Pair best = g.as_stored(range);
  if (best.scale == 0) { // too small for the dtype: one code stands for all
    best = {1, best.bias};
  }
  float least = g.error(best);
  auto judge = [&](Pair p) {
    p = g.as_stored(p);
    const float error = p.scale != 0 ? g.error(p) : least;
    const bool better = error < least;
    least = better ? error : least;
    best = better ? p : best;
    return better;
  };
  auto attempt = [&](Pair p) {
    for (int round = 0; round < kRounds && g.refine(p, total, total_x); ++round) {
    }
    judge(p);
  };
  attempt(range);
  for (const float share : kShrunken) {
    const float width = 2 * half * share / g.top;
    attempt({width > 1e-8f ? width : 1e-8f, middle - half * share});
  }
  Pair last = best;
  for (int round = 0; round < kLastRounds && g.refine(last, total, total_x) && judge(last); ++round) {
  }
  for (int at = 0; at < size; at += kWidth) {
    const F32 found = g.codes(at, best);
    for (int lane = 0; lane < kWidth; ++lane) {
      codes[at + lane] = static_cast<uint8_t>(found[lane]);
    }
  }
  *scale = best.scale;
  *bias = best.bias;
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(FitKernels, fit_kernels) = {MLXINFER_ISA::group};
}
