#pragma once

#include <string>
#include <vector>

#include "attention/plan.h"
#include "attention/work.h"
#include "op/op.h"

namespace mlxinfer::cpu {

using Arrays = std::vector<mx::array>;

struct HeadSizes {
  int64_t kv, key_dim, value_dim;
};

// Queries, keys and values lie behind one another in pieces of these widths, none of the three in two pieces. Returns the number of
// query heads, or 0 where the widths do not fit.
int64_t query_heads(const std::vector<int64_t>& widths, const HeadSizes& sizes);

// The rows of one such piece.
struct RowsOfHeads {
  Rows rows;
  Float dtype;
};

// Finds them in the pieces, for pages that are already in `work`.
void split_heads(const std::vector<RowsOfHeads>& pieces, int64_t heads, AttentionWork& work);

// The pages of a layer as MLX has them: those of keys, then of values.
struct PageArrays {
  Arrays sealed; // [heads, pages, channels, 64] and [heads, pages, 64, channels], or codes and scales of each
  Arrays first; // two of the former, or none
  Arrays open; // [slots, heads, 64, channels]
  int bits[2]; // of sealed keys and values; 16: none of codes

  HeadSizes sizes() const {
    return {open[0].shape(1), open[0].shape(3), open[1].shape(3)};
  }
  PageForm form(bool values, bool raw = false) const;
};

// Throws unless they belong together and have what the plan refers to.
void check_pages(const std::string& operation, const PageArrays& pages, const AttentionPlan& plan);

struct ArrayKind {
  mx::Shape shape;
  mx::Dtype dtype;
};
// What becomes full in a step: arrays like `sealed`, then like `first`.
std::vector<ArrayKind> filled_kinds(const PageArrays& pages, const AttentionPlan& plan);

// Makes the stores of evaluated pages. `filled` are allocated arrays of `filled_kinds`; none where nothing becomes full.
void set_stores(const PageArrays& pages, const mx::array* filled, mx::cpu::CommandEncoder& encoder, AttentionWork& work);

std::string shapes_text(const Arrays& arrays);

} // namespace mlxinfer::cpu
