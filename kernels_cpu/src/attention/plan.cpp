#include "attention/plan.h"

#include <algorithm>
#include <limits>
#include <set>

#include "attention/form.h"
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
  std::set<int64_t> seen_slots;
  for (auto& [slot, start, count, past, first_page, pages] : parts) {
    PlanSegment s{slot, start, count, past, first_page, std::move(pages), full_pages, first_full_pages};
    if (slot < 0 || start != rows || count < 1 || past < 0 || first_page < 0) {
      refuse(op, "segments must have a slot and rows, each beginning where the one before it ends.");
    }
    if (!seen_slots.insert(slot).second) {
      refuse(op, "slot " + std::to_string(slot) + " has two segments; a sequence must have one.");
    }
    if (past / kPageTokens != s.end_page() || std::max<int64_t>(past - window + 1, 0) / kPageTokens < first_page) {
      refuse(op, "the pages of a segment must hold all of its past that it sees, up to the open page.");
    }
    for (size_t i = 0; i < s.pages.size(); ++i) {
      const int64_t page = s.pages[i];
      if (page < 0 && (i > 0 || first_page > 0)) {
        refuse(op, "page numbers must not be negative, but for the first page of a sequence.");
      }
      int64_t& needed = page < 0 ? first_pages : sealed_pages;
      needed = std::max(needed, (page < 0 ? ~page : page) + 1);
    }
    rows += count;
    slots = std::max(slots, slot + 1);
    full_pages += s.filled();
    first_full_pages += s.fills_first() ? 1 : 0;
    segments.push_back(std::move(s));
  }
}

} // namespace mlxinfer::cpu
