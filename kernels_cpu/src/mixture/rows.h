#pragma once

#include <cstdint>

#include "mixture/mixture.h"
#include "op/rows.h"

namespace mlxinfer::cpu {

enum class Scores : int { none, softmax, sigmoid };

// How a router chooses: the best `chosen` by scores + bias, from the groups whose best `ranked` have the largest sums. Their scores, of
// `none` the softmax over the chosen logits, become shares: divided by max(sum, least) + added where `normalized`, times `scale`, and times
// the chosen expert's gain where there are gains.
struct Route {
  Scores scores;
  int64_t experts, chosen;
  bool normalized;
  float least, added, scale;
  int64_t groups, kept, ranked;
};

// Logits `[rows, experts]` to experts and shares, `[rows, chosen]` each.
struct RouteRows {
  Route route;
  const float *bias, *gains; // [experts], or null
  Rows logits;
  Float dtype;
  int32_t* experts;
  float* shares;

  void run() const;
};

// Every row of `onto`, of which there may be none, plus factor * the sum of `each` neighbouring rows of x times their shares: given ones,
// or the sigmoid of a gate's only column, or none.
struct SumRows {
  Rows x; // [rows * each, size]
  int64_t each;
  const float* shares; // [rows, each] or null
  Rows gate; // [rows, 1] or data null
  float factor;
  Rows onto; // or data null
  void* out;
  int64_t out_stride;
  Float dtype;

  void run() const;
};

// Parts of rows times a unit of others: part p of a row begins at p * size in x and in `out`, and at p * gate_step in `gate`. Rows with a
// negative expert are left out.
struct GateRows {
  Unit unit;
  float alpha, limit;
  Rows x, gate;
  int64_t parts, gate_step;
  const int32_t* experts; // [rows] or null
  void* out;
  int64_t out_stride;
  Float dtype;

  void run() const;
};

} // namespace mlxinfer::cpu
