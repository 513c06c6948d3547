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

// Throws unless sealed and open pages, keys and values each, belong together and have what the plan refers to.
void check_pages(const std::string& operation, const Arrays& sealed, const Arrays& open, const AttentionPlan& plan);

// Evaluated pages. `full` is left for the caller to set.
PageStore page_store(const mx::array& sealed, const mx::array& open, const AttentionPlan& plan, mx::cpu::CommandEncoder& encoder);

std::string shapes_text(const Arrays& arrays);

} // namespace mlxinfer::cpu
