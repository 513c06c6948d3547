#include "attention/plan.h"

#include <algorithm>
#include <limits>

#include "attention/tile.h"
#include "op/refuse.h"

namespace mlxinfer::cpu {

int64_t PlanSegment::filled() const {
  return (past + count) / kPageTokens - end_page();
}

AttentionPlan::AttentionPlan(std::vector<Row> parts, std::optional<int64_t> seen)
    : window(seen.value_or(std::numeric_limits<int32_t>::max())) {
  const char* op = "AttentionPlan";
  if (window < 1) {
    refuse(op, "a window of " + std::to_string(window) + " tokens sees nothing.");
  }
  window = std::min<int64_t>(window, std::numeric_limits<int32_t>::max());
  for (auto& [slot, start, count, past, first_page, pages] : parts) {
    PlanSegment s{slot, start, count, past, first_page, std::move(pages), full_pages};
    if (slot < 0 || start != rows || count < 1 || past < 0 || first_page < 0) {
      refuse(op, "segments must have a slot and rows, each beginning where the one before it ends.");
    }
    if (past / kPageTokens != s.end_page() || std::max<int64_t>(past - window + 1, 0) / kPageTokens < first_page) {
      refuse(op, "the pages of a segment must hold all of its past that it sees, up to the open page.");
    }
    for (auto page : s.pages) {
      if (page < 0) {
        refuse(op, "page numbers must not be negative.");
      }
      sealed_pages = std::max<int64_t>(sealed_pages, page + 1);
    }
    rows += count;
    slots = std::max(slots, slot + 1);
    full_pages += s.filled();
    segments.push_back(std::move(s));
  }
}

} // namespace mlxinfer::cpu
