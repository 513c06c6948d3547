#pragma once

#include <stdint.h>

#include "dispatch/isa.h"

namespace mlxinfer::cpu {

// Parts of layers with a state, in float32. `from` may be `to`.
struct RecurrentKernels {
  // out[c] = sum over j of weights[j * weight_stride + c] * x[j * stride + c], plus bias[c], then silu, as far as they are wanted
  void (*convolve)(
      const float* x, int64_t stride, const float* weights, int64_t weight_stride, const float* bias, int64_t taps, bool silu, float* out, int64_t channels);

  // x = x / sqrt(sum(x^2) + eps) * scale
  void (*unit)(float* x, int64_t size, float eps, float scale);

  // A token's step of a gated delta net's head, whose state is `[values, keys]`: state *= kept; state += beta * (v - state k) k^T; y = state q
  void (*delta)(
      const float* from, float* to, int64_t values, int64_t keys, const float* q, const float* k, const float* v, float kept, float beta, float* y);

  // The same where each channel of a key keeps a share of its own, kept [keys].
  void (*delta_by_channel)(
      const float* from, float* to, int64_t values, int64_t keys, const float* q, const float* k, const float* v, const float* kept, float beta, float* y);
  // kept = exp(-exp(decay) * log(1 + exp(rate + bias)))
  void (*shares)(const float* rate, const float* bias, const float* decay, float* kept, int64_t size);

  // A token's step of a Mamba 2 head, whose state is `[channels, size]`: state = state * kept + step * x write^T; y = state read + skip * x
  void (*mamba)(
      const float* from, float* to, int64_t channels, int64_t size, const float* write, const float* read, const float* x, float kept, float step,
      float skip, float* y);

  // By the order of `Float`: out = norm(x * unit(gate)), or norm(x) * unit(gate) if `first`; the norm with a weight, or none (`normed`); the
  // unit is the sigmoid, or silu
  void (*gated[3])(
      const float* x, const void* gate, const float* weight, float eps, bool normed, bool first, bool silu, void* out, int64_t size);

  // out = a * b, and the other way round
  void (*times[3])(const void* a, const void* b, float* out, int64_t size);
  void (*back[3])(const float* a, const void* b, void* out, int64_t size);
};

MLXINFER_DECLARE_KERNELS(RecurrentKernels, recurrent_kernels)

} // namespace mlxinfer::cpu
