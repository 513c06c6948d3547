#pragma once

#include <cstdint>
#include <memory>

#include "attention/plan.h"
#include "attention/tile.h"

namespace mlxinfer::cpu {

// Keys or values of a layer, in one dtype with `dim` channels.
struct PageStore {
  const char* sealed; // [kv_heads][pages][kPageTokens][dim]
  char* open; // [slots][kv_heads][kPageTokens][dim]
  char* full; // [kv_heads][full_pages][kPageTokens][dim]: the pages that this step fills
  const char* rows; // the step's own, `row_stride` bytes apart, [kv_heads][dim] each
  int64_t row_stride, sealed_pages, full_pages, kv_heads, dim, item_size;
  int dtype; // in tables of kernels
  void (*convert)(const void* from, int64_t size, void* to); // rows to pages
  int64_t row_item_size;

  int64_t page_bytes() const {
    return kPageTokens * dim * item_size;
  }
  char* open_page(int64_t slot, int64_t head) const {
    return open + (slot * kv_heads + head) * page_bytes();
  }
  char* full_page(int64_t page, int64_t head) const {
    return full + (head * full_pages + page) * page_bytes();
  }
  const char* page(const PlanSegment& segment, int64_t page, int64_t head) const;
  // Puts a segment's rows of one head behind its open page; what becomes full moves to the full pages.
  void append(const PlanSegment& segment, int64_t head) const;
};

// Everything that attention in one layer and step needs.
struct AttentionWork {
  std::shared_ptr<const AttentionPlan> plan;
  PageStore keys, values;
  const char* queries; // rows `query_stride` bytes apart, [heads][key_dim] each
  int64_t query_stride, query_item_size, heads_per_kv;
  int dtype; // of queries and output, in tables of kernels
  float scale, softcap;
  const float* sinks; // [heads], or null
  char* out; // [rows][heads][value_dim]

  void run() const;
};

} // namespace mlxinfer::cpu
