#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "matmul/multiply.h"
#include "op/op.h"

namespace mlxinfer::cpu {

// A packed matrix `[n, k]` and perhaps a bias `[n]`.
struct Projection {
  mx::array data;
  Layout layout;
  Precision precision;
  std::optional<mx::array> bias;
};

struct Norm {
  mx::array weight;
  float eps;
};

// What a decoder block consists of: attention, then a gated feed-forward layer, each behind a norm and added to the stream:
//   x += after_attention(output(attend(qkv(before_attention(x)))))
//   x += after_mlp(down(gate(gate_up(before_mlp(x)))))
// Norms that are not there do nothing. Vectors have the dtype of x.
struct Block {
  std::optional<Norm> before_attention, after_attention, before_mlp, after_mlp;
  std::vector<Projection> qkv; // one to three, which give queries, keys and values behind one another
  std::optional<Norm> query_norm, key_norm; // of each head
  std::optional<mx::array> sinks; // float32, one per query head
  float scale, softcap; // softcap 0: none
  Projection output, gate_up, down;
  Gate gate;
};

// Blocks that follow one another. Shared as a plan is (attention/plan.h).
struct Blocks : std::enable_shared_from_this<Blocks> {
  explicit Blocks(std::vector<Block> given); // throws std::invalid_argument where sizes do not fit

  std::vector<Block> blocks;
  int64_t hidden;
  mx::Dtype dtype; // of x and of all vectors
};

} // namespace mlxinfer::cpu
