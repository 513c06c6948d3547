#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace mlxinfer::cpu {

// The rows that one sequence has in a step, and where its past lies.
struct PlanSegment {
  int64_t slot, start, count, past;
  int64_t first_page; // of its history that is still there
  std::vector<int32_t> pages; // sealed, from first_page on; ~p is page p of the pool of first pages, p one of the pool of all others
  int64_t full_page; // how many pages the segments before this one fill
  int64_t first_full_page; // how many of those are the first one of their sequence

  int64_t end_page() const { // the open page
    return first_page + static_cast<int64_t>(pages.size());
  }
  int64_t filled() const; // pages that become full
  bool fills_first() const {
    return end_page() == 0 && filled() > 0;
  }
};

// What the layers of one window have in common in a step. Shared from this, so that what MLX's thread drops last is no reference to a
// Python object: that would wait for the interpreter's lock, whose holder may be waiting for the thread.
struct AttentionPlan : std::enable_shared_from_this<AttentionPlan> {
  // (slot, start, count, past, first_page, pages) each; together they cover the rows from 0 on in order.
  using Row = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, std::vector<int32_t>>;
  AttentionPlan(std::vector<Row> rows, std::optional<int64_t> window);

  std::vector<PlanSegment> segments;
  int64_t window; // positions that a query sees, itself included
  int64_t rows = 0;
  int64_t full_pages = 0, first_full_pages = 0; // that become full, and those of them that are the first one of their sequence
  int64_t slots = 0, sealed_pages = 0, first_pages = 0; // that the arrays must have at least
};

} // namespace mlxinfer::cpu
