#pragma once

#include <cstdint>
#include <memory>

#include "attention/heads.h"
#include "attention/pages.h"
#include "attention/plan.h"

namespace mlxinfer::cpu {

// Everything that attention in one layer and step needs.
struct AttentionWork {
  std::shared_ptr<const AttentionPlan> plan;
  std::shared_ptr<const Rotation> rotation; // null: heads are not rotated
  PageStore keys, values;
  Heads queries, new_keys, new_values; // the step's rows; without keys nothing is appended: another work has filled these pages before
  int64_t heads_per_kv;
  float scale, softcap;
  const float* sinks; // [heads], or null
  char* out; // [rows][heads][value_dim] in the dtype of the queries
  int64_t out_item_size;

  void run() const;
};

} // namespace mlxinfer::cpu
