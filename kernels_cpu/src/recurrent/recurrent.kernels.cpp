#include "recurrent/recurrent.h"

#include "simd/floats.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

void convolve(
    const float* x, int64_t stride, const float* weights, int64_t weight_stride, const float* bias, int64_t taps, bool silu, float* out, int64_t channels) {
  for_lanes(channels, [=](auto load, auto store, int64_t i) {
    F32 v = bias == nullptr ? F32{} : load(bias + i);
    for (int64_t j = 0; j < taps; ++j) {
      v = fma(load(x + j * stride + i), load(weights + j * weight_stride + i), v);
    }
    store(out + i, silu ? v * sigmoid(v) : v);
  });
}

MLXINFER_INLINE float dot(const float* a, const float* b, int64_t size) {
  F32 sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kWidth <= size; i += 2 * kWidth) {
    sums[0] = fma(load(a + i), load(b + i), sums[0]);
    sums[1] = fma(load(a + i + kWidth), load(b + i + kWidth), sums[1]);
  }
  for_lanes(size - i, [&](auto load, auto, int64_t j) { sums[0] = fma(load(a + i + j), load(b + i + j), sums[0]); });
  return sum_across(sums[0] + sums[1]);
}

void unit(float* x, int64_t size, float eps, float scale) {
  const float factor = scale / __builtin_sqrtf(dot(x, x, size) + eps);
  for_lanes(size, [=](auto load, auto store, int64_t i) { store(x + i, load(x + i) * factor); });
}

// Rows that are in work together, so that sums across lanes wait for one another less.
constexpr int kTogether = 4;

// `kept` is one number, or one for each channel of a key.
template <int Count, bool ByChannel>
MLXINFER_INLINE void delta_rows(
    const float* from, float* to, int64_t keys, const float* q, const float* k, const float* v, const float* kept, float beta, float both, float* y) {
  F32 by_key[Count] = {}, by_query[Count] = {};
  for_lanes(keys, [&](auto load, auto, int64_t i) {
    const F32 key = load(k + i), query = load(q + i);
    F32 share{};
    if constexpr (ByChannel) {
      share = load(kept + i);
    }
    MLXINFER_UNROLL
    for (int r = 0; r < Count; ++r) {
      F32 s = load(from + r * keys + i);
      s = ByChannel ? s * share : s;
      by_key[r] = fma(s, key, by_key[r]);
      by_query[r] = fma(s, query, by_query[r]);
    }
  });
  const float rest = ByChannel ? 1.0f : kept[0];
  float added[Count];
  MLXINFER_UNROLL
  for (int r = 0; r < Count; ++r) {
    added[r] = beta * (v[r] - rest * sum_across(by_key[r]));
    y[r] = rest * sum_across(by_query[r]) + added[r] * both;
  }
  for_lanes(keys, [&](auto load, auto store, int64_t i) {
    const F32 key = load(k + i);
    F32 share = broadcast(rest);
    if constexpr (ByChannel) {
      share = load(kept + i);
    }
    MLXINFER_UNROLL
    for (int r = 0; r < Count; ++r) {
      store(to + r * keys + i, fma(broadcast(added[r]), key, share * load(from + r * keys + i)));
    }
  });
}

template <bool ByChannel>
MLXINFER_INLINE void delta_head(
    const float* from, float* to, int64_t values, int64_t keys, const float* q, const float* k, const float* v, const float* kept, float beta, float* y) {
  const float both = dot(q, k, keys);
  int64_t r = 0;
  for (; r + kTogether <= values; r += kTogether) {
    delta_rows<kTogether, ByChannel>(from + r * keys, to + r * keys, keys, q, k, v + r, kept, beta, both, y + r);
  }
  for (; r < values; ++r) {
    delta_rows<1, ByChannel>(from + r * keys, to + r * keys, keys, q, k, v + r, kept, beta, both, y + r);
  }
}

void delta(
    const float* from, float* to, int64_t values, int64_t keys, const float* q, const float* k, const float* v, float kept, float beta, float* y) {
  delta_head<false>(from, to, values, keys, q, k, v, &kept, beta, y);
}

void delta_by_channel(
    const float* from, float* to, int64_t values, int64_t keys, const float* q, const float* k, const float* v, const float* kept, float beta, float* y) {
  delta_head<true>(from, to, values, keys, q, k, v, kept, beta, y);
}

// log(1 + e^x): of u = e^-|x| the logarithm of 1 + u is 2 atanh(u / (2 + u)), whose series has converged after seven terms.
MLXINFER_INLINE F32 softplus(F32 x) {
  const F32 u = exp(-max(x, -x)), z = u / (u + 2.0f), s = z * z;
  F32 p = s * (1.0f / 13) + 1.0f / 11;
  p = p * s + 1.0f / 9;
  p = p * s + 1.0f / 7;
  p = p * s + 1.0f / 5;
  p = p * s + 1.0f / 3;
  p = p * s + 1.0f;
  return max(x, F32{}) + 2.0f * z * p;
}

void shares(const float* rate, const float* bias, const float* decay, float* kept, int64_t size) {
  for_lanes(size, [=](auto load, auto store, int64_t i) { store(kept + i, exp(-exp(load(decay + i)) * softplus(load(rate + i) + load(bias + i)))); });
}

template <int Count>
MLXINFER_INLINE void mamba_rows(
    const float* from, float* to, int64_t size, const float* write, const float* read, const float* x, float kept, float step, float skip, float* y) {
  F32 sums[Count] = {};
  for_lanes(size, [&](auto load, auto store, int64_t i) {
    const F32 w = load(write + i), c = load(read + i);
    MLXINFER_UNROLL
    for (int r = 0; r < Count; ++r) {
      const F32 s = fma(broadcast(step * x[r]), w, kept * load(from + r * size + i));
      store(to + r * size + i, s);
      sums[r] = fma(s, c, sums[r]);
    }
  });
  MLXINFER_UNROLL
  for (int r = 0; r < Count; ++r) {
    y[r] = sum_across(sums[r]) + skip * x[r];
  }
}

void mamba(
    const float* from, float* to, int64_t channels, int64_t size, const float* write, const float* read, const float* x, float kept, float step, float skip,
    float* y) {
  int64_t r = 0;
  for (; r + kTogether <= channels; r += kTogether) {
    mamba_rows<kTogether>(from + r * size, to + r * size, size, write, read, x + r, kept, step, skip, y + r);
  }
  for (; r < channels; ++r) {
    mamba_rows<1>(from + r * size, to + r * size, size, write, read, x + r, kept, step, skip, y + r);
  }
}

template <typename T>
void gated(const float* x, const void* gates, const float* weight, float eps, bool normed, bool first, bool silu, void* to, int64_t size) {
  auto g = static_cast<const T*>(gates);
  auto y = static_cast<T*>(to);
  auto unit = [silu](F32 gate) { return silu ? gate * sigmoid(gate) : sigmoid(gate); };
  F32 squares{};
  for_lanes(size, [&](auto load, auto, int64_t i) {
    const F32 v = first ? load(x + i) : load(x + i) * unit(load(g + i));
    squares = fma(v, v, squares);
  });
  const float factor = normed ? 1.0f / __builtin_sqrtf(sum_across(squares) / static_cast<float>(size) + eps) : 1.0f;
  for_lanes(size, [=](auto load, auto store, int64_t i) {
    const F32 v = load(x + i) * unit(load(g + i)) * factor;
    store(y + i, weight == nullptr ? v : v * load(weight + i));
  });
}

template <typename T>
void times(const void* a, const void* b, float* out, int64_t size) {
  auto x = static_cast<const T*>(a), y = static_cast<const T*>(b);
  for_lanes(size, [=](auto load, auto store, int64_t i) { store(out + i, load(x + i) * load(y + i)); });
}

template <typename T>
void back(const float* a, const void* b, void* out, int64_t size) {
  auto y = static_cast<const T*>(b);
  auto z = static_cast<T*>(out);
  for_lanes(size, [=](auto load, auto store, int64_t i) { store(z + i, load(a + i) * load(y + i)); });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_FLOATS_(name) {MLXINFER_ISA::name<float>, MLXINFER_ISA::name<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::name<MLXINFER_ISA::Half>}
MLXINFER_DEFINE_KERNELS(RecurrentKernels, recurrent_kernels) = {
    MLXINFER_ISA::convolve,  MLXINFER_ISA::unit,       MLXINFER_ISA::delta,      MLXINFER_ISA::delta_by_channel, MLXINFER_ISA::shares, MLXINFER_ISA::mamba,
    MLXINFER_FLOATS_(gated), MLXINFER_FLOATS_(times), MLXINFER_FLOATS_(back)};
}
