// Decode attention: what is known when the kernel is compiled, and what follows from it.
#pragma once
#include "include/codes.h"

// What is known when the kernel is compiled.
template <typename T_, int K_BITS_, int V_BITS_, int KEY_DIM_, int VALUE_DIM_, int GROUP_, int HEADS_, int QUERIES_, int KEY_RUN_,
          int VALUE_RUN_, int SIMDGROUPS_, bool SHARED_, int STAGE_>
struct Decode {
  typedef T_ T;
  static constexpr constant int K_BITS = K_BITS_, V_BITS = V_BITS_, KEY_DIM = KEY_DIM_, VALUE_DIM = VALUE_DIM_;
  static constexpr constant int HEADS = HEADS_, QUERIES = QUERIES_, SIMDGROUPS = SIMDGROUPS_, STAGE = STAGE_;
  static constexpr constant bool SHARED = SHARED_;
  // Keys: KEY_LANES lanes read a channel's row of 64 tokens, KEY_RUN tokens each; a simdgroup reads KEY_ROWS channels at a time.
  static constexpr constant int KEY_RUN = KEY_RUN_, KEY_LANES = 64 / KEY_RUN_, KEY_ROWS = KEY_RUN_ / 2;
  // Values: VALUE_LANES lanes read a token's row, VALUE_RUN channels each, and RUNS times where the head is wide.
  static constexpr constant int VALUE_RUN = VALUE_RUN_, PARTS = VALUE_DIM_ / VALUE_RUN_;
  static constexpr constant int VALUE_LANES = PARTS > 16 ? 32 : PARTS > 8 ? 16 : PARTS > 4 ? 8 : PARTS > 2 ? 4 : PARTS > 1 ? 2 : 1;
  static constexpr constant int VALUE_ROWS = 32 / VALUE_LANES, RUNS = (PARTS + VALUE_LANES - 1) / VALUE_LANES;
  // Channels of V that share a scale and a bias. Where V is kept as it is, one group stands for none.
  static constexpr constant int GROUP = V_BITS_ == 16 ? VALUE_DIM_ : GROUP_, GROUPS = VALUE_DIM_ / GROUP;
};

// How many rows of `bytes` fit into `stage` bytes: a power of two, or all `rows` of the page.
constexpr int rows_at_once(int stage, int bytes, int rows) {
  const int fit = stage / bytes;
  return fit >= rows ? rows : fit >= 256 ? 256 : fit >= 128 ? 128 : fit >= 64 ? 64 : fit >= 32 ? 32 : fit >= 16 ? 16 : fit >= 8 ? 8 : 4;
}

// Rows of a page, and how many of them are worked on at once (all, unless simdgroups share them).
template <typename D, int BITS>
struct KeyRows {
  static constexpr constant int bytes = 8 * Element<typename D::T, BITS>::bits;
  static constexpr constant int part = D::SHARED ? rows_at_once(D::STAGE, bytes, D::KEY_DIM) : D::KEY_DIM;
};

template <typename D, int BITS>
struct ValueRows {
  static constexpr constant int bytes = (D::VALUE_DIM * Element<typename D::T, BITS>::bits + 31) / 32 * 4;
  static constexpr constant int fit = rows_at_once(D::STAGE, bytes, 64), weights_fit = rows_at_once(8192, 4 * D::QUERIES * D::SIMDGROUPS, 64);
  static constexpr constant int part = !D::SHARED ? 64 : fit < weights_fit ? fit : weights_fit;
};

// The tokens whose weights lie in threadgroup memory at once.
template <typename D>
struct WeightRows {
  static constexpr constant int sealed = ValueRows<D, D::V_BITS>::part, plain = ValueRows<D, 16>::part;
  static constexpr constant int part = sealed > plain ? sealed : plain;
};

// What a threadgroup's memory has to hold, in elements.
template <typename D, int STAGED_QUERIES>
struct Room {
  static constexpr constant int queries = STAGED_QUERIES > 0 ? STAGED_QUERIES * D::KEY_DIM : 1;
  static constexpr constant int stage = D::SHARED ? D::STAGE / 4 : 1;
  static constexpr constant int key_scales = D::SHARED && D::K_BITS != 16 ? D::KEY_DIM : 1;
  static constexpr constant int value_scales = D::V_BITS == 16 ? 1 : (D::SHARED ? 1 : D::SIMDGROUPS) * 64 * D::GROUPS;
  static constexpr constant int weights = WeightRows<D>::part * D::QUERIES;  // of a simdgroup
  // Of all simdgroups; when they merge their answers, these take the place of the weights.
  static constexpr constant int merged = D::SHARED ? 1 : D::SIMDGROUPS * D::VALUE_DIM;
  static constexpr constant int floats = D::SIMDGROUPS * weights > merged ? D::SIMDGROUPS * weights : merged;
  static constexpr constant int softmaxes = D::SHARED ? 1 : D::SIMDGROUPS * D::QUERIES * 2;
};
