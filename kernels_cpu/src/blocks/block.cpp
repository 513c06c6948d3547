#include "blocks/block.h"

namespace mlxinfer::cpu {
namespace {

constexpr const char* kName = "blocks";

void check_vector(const mx::array& a, int64_t size, mx::Dtype dtype, const char* what) {
  if (a.shape() != mx::Shape{static_cast<int>(size)} || a.dtype() != dtype || !a.flags().row_contiguous) {
    refuse(kName, std::string(what) + " " + dtype_text(a) + " " + shape_text(a.shape()) + " must have " + std::to_string(size) + " elements.");
  }
}

void check_projection(const Projection& p, int64_t n, int64_t k, mx::Dtype dtype, const char* what) {
  if (p.layout.n != n || p.layout.k != k || p.data.ndim() != 2 || p.data.shape(0) != p.layout.panels() || p.data.shape(1) != p.layout.panel_bytes()) {
    refuse(kName, std::string(what) + " [" + std::to_string(p.layout.n) + ", " + std::to_string(p.layout.k) + "] must be one matrix [" +
           std::to_string(n) + ", " + std::to_string(k) + "].");
  }
  if (p.bias) {
    check_vector(*p.bias, n, dtype, "a bias");
  }
}

void check(const Block& b, int64_t hidden, mx::Dtype dtype) {
  for (const auto* norm : {&b.before_attention, &b.after_attention, &b.before_mlp, &b.after_mlp}) {
    if (*norm) {
      check_vector((*norm)->weight, hidden, dtype, "a norm");
    }
  }
  for (const auto* norm : {&b.query_norm, &b.key_norm}) {
    if (*norm) {
      check_vector((*norm)->weight, (*norm)->weight.size(), dtype, "a head's norm");
    }
  }
  if (b.qkv.empty() || b.qkv.size() > 3) {
    refuse(kName, "queries, keys and values come from one to three matrices.");
  }
  for (const auto& p : b.qkv) {
    check_projection(p, p.layout.n, hidden, dtype, "the projection of queries, keys and values");
  }
  if (b.sinks) {
    check_vector(*b.sinks, b.sinks->size(), mx::float32, "sinks");
  }
  const int64_t inner = b.gate_up.layout.n / 2;
  check_projection(b.output, hidden, b.output.layout.k, dtype, "the output");
  check_projection(b.gate_up, 2 * inner, hidden, dtype, "gate and up");
  check_projection(b.down, hidden, inner, dtype, "down");
  if (inner % kPanelRows != 0) {
    refuse(kName, "gate and up need a multiple of 16 rows each.");
  }
}

} // namespace

Blocks::Blocks(std::vector<Block> given) : blocks(std::move(given)), hidden(0), dtype(mx::float32) {
  if (blocks.empty()) {
    refuse(kName, "there must be one block at least.");
  }
  const Block& first = blocks.front();
  hidden = first.output.layout.n;
  for (const auto* norm : {&first.before_attention, &first.after_attention, &first.before_mlp, &first.after_mlp}) {
    if (*norm) {
      dtype = (*norm)->weight.dtype();
    }
  }
  for (const auto& block : blocks) {
    check(block, hidden, dtype);
  }
}

} // namespace mlxinfer::cpu
