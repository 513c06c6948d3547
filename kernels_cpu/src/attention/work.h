#pragma once

#include <cstdint>
#include <memory>

#include "attention/heads.h"
#include "attention/plan.h"
#include "attention/tile.h"

namespace mlxinfer::cpu {

// Keys or values of a layer, in one dtype with `dim` channels.
struct PageStore {
  const char* sealed; // [kv_heads][pages][kPageTokens][dim]
  char* open; // [slots][kv_heads][kPageTokens][dim]
  char* full; // [kv_heads][full_pages][kPageTokens][dim]: the pages that this step fills
  int64_t sealed_pages, full_pages, kv_heads, dim, item_size;
  int dtype; // in tables of kernels

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
  void append(const PlanSegment& segment, int64_t head, const Heads& rows) const;
};

// Everything that attention in one layer and step needs.
struct AttentionWork {
  std::shared_ptr<const AttentionPlan> plan;
  std::shared_ptr<const Rotation> rotation; // null: heads are not rotated
  PageStore keys, values;
  Heads queries, new_keys, new_values; // the step's rows
  int64_t heads_per_kv;
  float scale, softcap;
  const float* sinks; // [heads], or null
  char* out; // [rows][heads][value_dim] in the dtype of the queries
  int64_t out_item_size;

  void run() const;
};

} // namespace mlxinfer::cpu
