#pragma once

#include <utility>

#include "attention/operands.h"
#include "blocks/program.h"
#include "op/bindings.h"
#include "recurrent/work.h"

namespace mlxinfer::cpu {

// What a step gives to blocks: pages, plans and rotations of each attention layer, those that read another's pages included; states of all
// recurrent layers in order, each `[sequences, ...]`, and the rows of the sequences, where there are such layers.
struct StepArrays {
  std::vector<Arrays> sealed, open, first;
  std::vector<std::pair<int, int>> bits;
  std::vector<std::shared_ptr<AttentionPlan>> plans;
  std::vector<std::shared_ptr<Rotation>> rotations;
  Arrays states;
  std::shared_ptr<Stretches> stretches;
  std::optional<mx::array> given; // [rows, n], for blocks that read such
};

// x afterwards, the states afterwards, then what becomes full in each attention layer.
Arrays run_blocks(const mx::array& x, std::shared_ptr<Blocks> blocks, StepArrays given);

} // namespace mlxinfer::cpu
