#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "matmul/multiply.h"
#include "mixture/rows.h"
#include "op/op.h"

namespace mlxinfer::cpu {

// Decoder blocks are a list of instructions on buffers, which a step makes anew; buffer 0 is the residual stream, and buffer 1 what a step
// gives next to it, to be read only. A buffer has rows for each row of the step: numbers of x's dtype, or of another one.
enum class Kind : int { same, f32, i32 };

// Columns `first` to `first + count` of a buffer whose rows are `width` numbers wide, `each` rows for each row of the step.
struct View {
  int buffer;
  int64_t width, first, count, each;
  Kind kind;

  bool is_whole() const {
    return first == 0 && count == width;
  }
};

// A packed matrix `[n, k]`, or one per expert `[experts, n, k]`, and perhaps a bias `[n]` or `[experts, n]`.
struct Projection {
  mx::array data;
  Layout layout;
  Precision precision;
  std::optional<mx::array> bias;
};

struct Norm {
  mx::array weight;
  float eps;
  bool centring; // whether the mean is subtracted first, which only NormView does
};

// y = gate(norm(x) @ matrix.T) + onto. Matrices of experts that nothing chooses from are for one of the neighbouring rows each.
struct Multiply {
  View x, y;
  Projection projection;
  std::optional<Norm> norm;
  std::optional<View> onto, experts;
  std::optional<Gate> gate;
};

// y = norm(x) + onto
struct NormView {
  View x, y;
  Norm norm;
  std::optional<View> onto;
};

// Attention over a layer's pages. Query heads begin `query_step` columns after one another. Where the first channels of a head are `still`,
// norms are for these alone and rotation for the rest, which queries may have in `turned`.
struct Attend {
  View queries;
  std::optional<View> turned, keys, values; // no keys and values: it reads the pages that the attention number `source` has filled
  View y;
  int64_t query_step, turned_step, still, source;
  std::optional<Norm> query_norm, key_norm, value_norm; // of each head
  std::optional<mx::array> query_gain; // float32, of each channel after rotation
  std::optional<mx::array> sinks; // float32, one per query head
  float scale, softcap; // softcap 0: none
};

// See RouteRows.
struct ChooseExperts {
  View logits, experts, shares;
  Route route;
  std::optional<mx::array> bias, gains;
};

// See SumRows.
struct AddRows {
  View x, y;
  std::optional<View> shares, gate, onto;
  float factor;
};

// See GateRows.
struct GateView {
  View x, gate, y;
  Unit unit;
  float alpha, limit;
  int64_t parts, gate_step;
  std::optional<View> experts;
};

// Brings chosen experts into the slots of a pool that is too small for all of them, some at a time.
class ExpertPool {
 public:
  virtual ~ExpertPool() = default;
  // The slots of wave number `wave`, from 0 on, valid until the next wave is asked for; negative for experts of other waves. Returns whether
  // another wave follows. `expected` are experts that the next layer is expected to choose. Called by the thread of the stream.
  virtual bool next(std::span<const int32_t> chosen, std::span<const int32_t> expected, int64_t wave, std::span<int32_t> slots) = 0;
};

// Runs the `count` instructions that follow once for each wave of the chosen experts, whose slots are in `slots` then. These instructions
// compute nothing for rows with a negative slot.
struct ExpertWaves {
  View experts, slots;
  std::optional<View> expected;
  int64_t count;
  std::shared_ptr<ExpertPool> pool;
};

// See DeltaWork; all vectors are float32.
struct Delta {
  View qkv, beta, rate, y;
  int64_t key_heads, value_heads, key_dim, value_dim, taps;

  int64_t decays() const {
    return rate.count / value_heads;
  }
  mx::array convolution, decay, decay_bias;
};

// See MambaWork.
struct Mamba {
  View mixed, steps, y;
  int64_t heads, dim, size, groups, taps;
  mx::array convolution;
  std::optional<mx::array> bias;
  mx::array decay, skip, step_bias;
  float least, most;
};

// See ShortConvWork.
struct ShortConvolution {
  View before, after, x, y;
  int64_t taps;
  mx::array convolution;
  std::optional<mx::array> bias;
};

// See GatedRows.
struct GatedNorm {
  View x, gate, y;
  std::optional<mx::array> weight;
  float eps;
  bool normed, first, silu;
  int64_t groups;
};

using Instruction =
    std::variant<Multiply, NormView, Attend, ChooseExperts, AddRows, GateView, ExpertWaves, Delta, Mamba, ShortConvolution, GatedNorm>;

// Shared as a plan is (attention/plan.h).
struct Blocks : std::enable_shared_from_this<Blocks> {
  Blocks(std::vector<Instruction> instructions, int64_t hidden, int64_t given, mx::Dtype dtype); // throws std::invalid_argument where sizes do not fit

  std::vector<Instruction> instructions;
  int64_t hidden, given; // columns of the stream, and of what a step gives next to it, or 0
  mx::Dtype dtype; // of x and, but for what is float32, of all vectors
  std::vector<int64_t> sizes; // bytes of each buffer for a row of the step; those of the first two are 0
  std::vector<const Attend*> attends; // those among the instructions
  std::vector<bool> read_again; // whether others read the pages of each
  std::vector<std::vector<mx::Shape>> states; // shapes that recurrent instructions keep for a sequence, in their order
};

} // namespace mlxinfer::cpu
