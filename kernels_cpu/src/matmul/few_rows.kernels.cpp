#include "matmul/few_rows.h"

#include "matmul/dot.h"
#include "matmul/matrix_unit.h"
#include "matmul/tile.h"

#if defined(__AVX512VNNI__) && defined(__linux__) && __has_include(<amxint8intrin.h>)
namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// Blocks between unpacking one and multiplying it, storing its products, and adding them: each takes long until the next can read it.
constexpr int kMultiply = 2, kStore = 4, kAdd = 6, kRing = 8;

// Tile registers, which the intrinsics take only as digits: codes in 0, both planes of q below one another in 1, sums of four blocks in 2 to 5.
constexpr TileConfiguration configuration(int rows) {
  TileConfiguration c{1, 0, {}, {}, {}};
  c.rows[0] = kBlockColumns / 4;
  c.row_bytes[0] = 4 * kPanelRows;
  c.rows[1] = static_cast<uint8_t>(2 * rows);
  c.row_bytes[1] = kBlockColumns;
  for (int i = 2; i < 6; ++i) {
    c.rows[i] = static_cast<uint8_t>(2 * rows);
    c.row_bytes[i] = 4 * kPanelRows;
  }
  return c;
}

// What becomes of one block on its way.
struct Stage {
  alignas(64) uint8_t codes[8 * 64];
  alignas(64) int32_t sums[2 * kMostFewRows][kPanelRows]; // [plane][row]
  F32 scale, bias;
};

template <Code C>
MLXINFER_INLINE void unpack(const Panel& panel, int64_t b, Headers<C>& headers, BlockScales& group, Stage& to) {
  using Form = Integers<C>;
  constexpr int64_t bytes = Form::kBits * 64;
  const uint8_t* block = panel.blocks + b * bytes;
  prefetch<bytes>(block + panel.ahead);
  if (b % panel.blocks_per_group == 0) {
    prefetch<128>(headers.at() + panel.ahead);
    group = headers.next();
  }
  to.scale = group.scale[0];
  to.bias = group.bias[0];
  const Codes codes = Form::unpack(block, 0);
  MLXINFER_UNROLL
  for (int i = 0; i < 8; ++i) {
    store_bits(to.codes + i * 64, codes.v[i]);
  }
}

// What integer.kernels.cpp does with a block's sums.
template <Code C, int Rows>
MLXINFER_INLINE void add(const Stage& from, const IntegerTile& x, int64_t b, F32 (&total)[Rows]) {
  using Form = Integers<C>;
  constexpr float unit = is_affine(C) ? 1.0f : 0.5f;
  const float *scales = x.scales + b * Rows, *sums = x.sums + b * Rows;
  MLXINFER_UNROLL
  for (int m = 0; m < Rows; ++m) {
    I32 sum = load_bits<I32>(from.sums[Rows + m]);
    if constexpr (Form::kOffset != 0) {
      sum += broadcast(Form::kOffset * (x.code_sums[2 * b * Rows + m] + x.code_sums[(2 * b + 1) * Rows + m]));
    }
    sum += load_bits<I32>(from.sums[m]) << 7;
    total[m] = fma(to_float(sum), from.scale * (scales[m] * unit), total[m]);
    if constexpr (is_affine(C)) {
      total[m] = fma(from.bias, broadcast(sums[m]), total[m]);
    }
  }
}

template <int Set>
MLXINFER_AMX MLXINFER_INLINE void multiply(const uint8_t* codes, const int8_t* q) {
  // GCC's intrinsic does not say that it reads memory.
  __asm__ volatile("" : : "m"(*reinterpret_cast<const uint8_t(*)[8 * 64]>(codes)));
  _tile_loadd(0, codes, 64);
  _tile_loadd(1, q, kBlockColumns);
  if constexpr (Set == 0) {
    _tile_zero(2);
    _tile_dpbsud(2, 1, 0);
  } else if constexpr (Set == 1) {
    _tile_zero(3);
    _tile_dpbsud(3, 1, 0);
  } else if constexpr (Set == 2) {
    _tile_zero(4);
    _tile_dpbsud(4, 1, 0);
  } else {
    _tile_zero(5);
    _tile_dpbsud(5, 1, 0);
  }
}

template <int Set>
MLXINFER_AMX MLXINFER_INLINE void keep(int32_t (*sums)[kPanelRows]) {
  if constexpr (Set == 0) {
    _tile_stored(2, sums, 64);
  } else if constexpr (Set == 1) {
    _tile_stored(3, sums, 64);
  } else if constexpr (Set == 2) {
    _tile_stored(4, sums, 64);
  } else {
    _tile_stored(5, sums, 64);
  }
}

template <Code C, int Rows>
class Pass {
 public:
  MLXINFER_INLINE Pass(const Panel& panel, const IntegerTile& x) : panel_(panel), x_(x), headers_(panel, 0) {}

  MLXINFER_AMX MLXINFER_INLINE void all(float* out) {
    for (int64_t b = 0; b < panel_.block_count + kAdd; b += 4) {
      step<0>(b);
      step<1>(b + 1);
      step<2>(b + 2);
      step<3>(b + 3);
    }
    MLXINFER_UNROLL
    for (int m = 0; m < Rows; ++m) {
      store(out + m * kPanelRows, total_[m]);
    }
  }

 private:
  // Everything that happens while block `b` is unpacked; nothing is done for blocks that there are not.
  template <int Set>
  MLXINFER_AMX MLXINFER_INLINE void step(int64_t b) {
    const auto is_block = [this](int64_t i) __attribute__((always_inline)) { return i >= 0 && i < panel_.block_count; };
    if (is_block(b)) {
      unpack<C>(panel_, b, headers_, group_, stages_[b % kRing]);
    }
    if (is_block(b - kMultiply)) {
      multiply<(Set + 4 - kMultiply) % 4>(
          stages_[(b - kMultiply) % kRing].codes, reinterpret_cast<const int8_t*>(x_.q) + (b - kMultiply) * 2 * Rows * kBlockColumns);
    }
    if (is_block(b - kStore)) {
      keep<(Set + 4 - kStore) % 4>(stages_[(b - kStore) % kRing].sums);
    }
    if (is_block(b - kAdd)) {
      add<C, Rows>(stages_[(b - kAdd) % kRing], x_, b - kAdd, total_);
    }
  }

  const Panel& panel_;
  const IntegerTile& x_;
  Headers<C> headers_;
  BlockScales group_{};
  F32 total_[Rows] = {};
  Stage stages_[kRing];
};

template <Code C, int Rows>
MLXINFER_AMX void panels(const Panel* panels, int64_t count, const IntegerTile& x, float* out) {
  static constexpr TileConfiguration shapes = configuration(Rows);
  // Takes as long as several blocks. Compilers believe that the intrinsic reads eight bytes.
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
  for (int64_t i = 0; i < count; ++i) {
    Pass<C, Rows>(panels[i], x).all(out + i * Rows * kPanelRows);
  }
  _tile_release();
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_ROWS_(code)                                                                                                         \
  {MLXINFER_ISA::panels<Code::code, 3>, MLXINFER_ISA::panels<Code::code, 4>, MLXINFER_ISA::panels<Code::code, 5>,                     \
   MLXINFER_ISA::panels<Code::code, 6>, MLXINFER_ISA::panels<Code::code, 7>, MLXINFER_ISA::panels<Code::code, 8>}
MLXINFER_DEFINE_KERNELS(FewRowsKernels, few_rows_kernels) = {
    {{}, {}, {}, MLXINFER_ROWS_(affine4), MLXINFER_ROWS_(affine5), {}, MLXINFER_ROWS_(affine8), {}, {}, {}, {}, {}, {}, {}, {}, {}}};
}

#else
namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(FewRowsKernels, few_rows_kernels) = {};
}
#endif
