#pragma once

#include <map>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "attention/operands.h"
#include "blocks/program.h"
#include "norm/norm_rows.h"
#include "recurrent/work.h"

namespace mlxinfer::cpu {

struct WaveWork;
using Work = std::variant<Product, AttentionWork, NormRows, RouteRows, SumRows, GateRows, WaveWork, DeltaWork, MambaWork, ShortConvWork, GatedRows>;
struct WorkList;

// See ExpertWaves.
struct WaveWork {
  std::shared_ptr<ExpertPool> pool;
  std::span<const int32_t> experts, expected;
  std::span<int32_t> slots;
  std::shared_ptr<WorkList> each; // what is repeated

  void run() const;
};

struct WorkList {
  std::vector<Work> all;
};

// Where the states of a recurrent instruction are read and written: the window, then the state, if there is one.
struct StatePlaces {
  const float* from[2];
  float* to[2];
};

// Lays out all the work of a step: instructions become work on pointers, in order.
class Plan {
 public:
  // `attention` are the attention layers' works, with pages, plan and rotation; `states` the places of recurrent instructions.
  Plan(
      const Blocks& blocks,
      int64_t rows,
      void* stream,
      const void* given,
      std::vector<AttentionWork> attention,
      std::vector<StatePlaces> states,
      std::shared_ptr<const Stretches> stretches,
      mx::cpu::CommandEncoder& encoder);

  std::vector<Work> take() {
    return std::move(work_);
  }

  void operator()(const Multiply& m);
  void operator()(const NormView& n);
  void operator()(const Attend& a);
  void operator()(const ChooseExperts& c);
  void operator()(const AddRows& a);
  void operator()(const GateView& g);
  void operator()(const ExpertWaves& w);
  void operator()(const Delta& d);
  void operator()(const Mamba& m);
  void operator()(const ShortConvolution& s);
  void operator()(const GatedNorm& g);

 private:
  char* place(const View& v) const;
  const int32_t* numbers(int64_t each);
  const int32_t* experts(const std::optional<View>& v) const;
  std::span<int32_t> integers(const View& v) const;
  Rows rows(const View& v) const;
  Rows rows(const std::optional<View>& v) const;

  const Float float_;
  const int64_t rows_;
  std::vector<char*> buffers_;
  std::vector<AttentionWork> attention_;
  std::vector<StatePlaces> states_;
  const std::shared_ptr<const Stretches> stretches_;
  mx::cpu::CommandEncoder& encoder_;
  std::map<int64_t, const int32_t*> numbers_;
  size_t next_attention_ = 0, next_state_ = 0;
  std::vector<Work> work_;
  std::shared_ptr<WorkList> wave_; // that the next `in_wave_` instructions are part of
  int64_t in_wave_ = 0;
};

void run(const Work& work);

} // namespace mlxinfer::cpu
