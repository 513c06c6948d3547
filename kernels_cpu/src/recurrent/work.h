#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "op/rows.h"

namespace mlxinfer::cpu {

// Rows of a step that belong to one sequence; the state of the i-th is the i-th in the arrays of states.
struct Stretch {
  int64_t start, count;
};

// For all recurrent layers of a step. Shared as a plan of attention is.
struct Stretches : std::enable_shared_from_this<Stretches> {
  std::vector<Stretch> all;
  int64_t rows = 0;
};

// A causal convolution of each channel: `weights` [taps][channels], `bias` [channels] or null. The last taps - 1 inputs of each sequence are
// its window, [sequences][taps - 1][channels]; `window_to` is other memory than `window_from`.
struct Convolution {
  const float *weights, *bias;
  int64_t channels, taps;
  const float* window_from;
  float* window_to;
};

// A gated delta net's recurrence: columns of queries, keys and values, beta and decay to `out` [rows][heads * value_dim]. Each key head serves
// `value_heads / key_heads` neighbouring value heads. `state_from` [sequences][value_heads][value_dim][key_dim] may be `state_to`. A head decays
// as a whole, or each channel of its keys for itself: `decays` is the number of rates of a value head, 1 or key_dim.
struct DeltaWork {
  std::shared_ptr<const Stretches> stretches;
  int64_t key_heads, value_heads, key_dim, value_dim, decays;
  Convolution convolution;
  const float *decay, *decay_bias; // [value_heads * decays]: the rate's logarithm, and what is added to the projected decay
  const float* state_from;
  float* state_to;
  Rows qkv, beta, rate;
  Float dtype;
  float* out;

  void run() const;
};

// Mamba 2's: columns of heads, of what writes and what reads the state, and of steps to `out` [rows][heads * dim].
// `state_from` [sequences][heads][dim][size] may be `state_to`.
struct MambaWork {
  std::shared_ptr<const Stretches> stretches;
  int64_t heads, dim, size, groups;
  Convolution convolution;
  const float *decay, *skip, *step_bias; // [heads]
  float least, most; // of a step
  const float* state_from;
  float* state_to;
  Rows mixed, steps;
  Float dtype;
  float* out;

  void run() const;
};

// LFM2's: after * convolution(before * x).
struct ShortConvWork {
  std::shared_ptr<const Stretches> stretches;
  Convolution convolution;
  Rows before, after, x;
  Float dtype;
  void* out; // contiguous

  void run() const;
};

// out = norm(x * unit(gate)), or norm(x) * unit(gate) if `first`, the unit being silu or the sigmoid, in `groups` equal parts of a row,
// whose norms have the same weight or parts of one (`shared` or not).
struct GatedRows {
  const float* x; // [count][size]
  Rows gate;
  const float* weight; // or null
  float eps;
  bool normed, first, silu, shared;
  int64_t groups;
  Float dtype; // of the gate and of `out`
  void* out; // contiguous

  void run() const;
};

} // namespace mlxinfer::cpu
