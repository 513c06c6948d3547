#include "matmul/matrix.h"

#include "matmul/dot.h"
#include "matmul/matrix_unit.h"
#include "matmul/tile.h"

#if defined(__AVX512VNNI__) && defined(__linux__) && __has_include(<amxint8intrin.h>)

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr int kRows = kLargestTile;

// Tile registers, which the intrinsics take only as digits. Sums of even steps are in 4 and 5 by plane, those of odd ones in 6 and 7.
constexpr int kCodesTile = 0, kFirstPlane = 1, kSecondPlane = 2, kFirstSums = 4, kTiles = 8;

constexpr TileConfiguration configuration(int group) {
  TileConfiguration c{1, 0, {}, {}, {}};
  c.rows[kCodesTile] = static_cast<uint8_t>(group / 4);
  c.row_bytes[kCodesTile] = 4 * kPanelRows;
  for (int i = kFirstPlane; i <= kSecondPlane; ++i) {
    c.rows[i] = kRows;
    c.row_bytes[i] = static_cast<uint16_t>(group);
  }
  for (int i = kFirstSums; i < kTiles; ++i) {
    c.rows[i] = kRows;
    c.row_bytes[i] = 4 * kPanelRows;
  }
  return c;
}

// The sums of a step, which is a group of a block: 32 columns, or 16.
typedef int32_t Sums[2][kRows][kPanelRows]; // [plane]
constexpr int kHeld = 4; // steps whose sums are in memory
constexpr int kAhead = 3; // blocks, for the second cache to answer in time

// Codes times each plane of q. The sums stay in the registers of `Set`.
template <int Set, int Planes>
MLXINFER_AMX MLXINFER_INLINE void multiply_step(const uint8_t* codes, const int8_t* q) {
  _tile_loadd(0, codes, 64);
  _tile_loadd(1, q, kBlockColumns);
  if constexpr (Planes == 2) {
    _tile_loadd(2, q + kRows * kBlockColumns, kBlockColumns);
  }
  if constexpr (Set == 0) {
    _tile_zero(4);
    _tile_dpbsud(4, 1, 0);
    if constexpr (Planes == 2) {
      _tile_zero(5);
      _tile_dpbsud(5, 2, 0);
    }
  } else {
    _tile_zero(6);
    _tile_dpbsud(6, 1, 0);
    if constexpr (Planes == 2) {
      _tile_zero(7);
      _tile_dpbsud(7, 2, 0);
    }
  }
}

template <int Set, int Planes>
MLXINFER_AMX MLXINFER_INLINE void store_step(Sums& sums) {
  if constexpr (Set == 0) {
    _tile_stored(4, sums[0], 64);
    if constexpr (Planes == 2) {
      _tile_stored(5, sums[1], 64);
    }
  } else {
    _tile_stored(6, sums[0], 64);
    if constexpr (Planes == 2) {
      _tile_stored(7, sums[1], 64);
    }
  }
}

// What integer.kernels.cpp does with a block's sums, those of its last step being `last`.
template <Code C, int Planes>
MLXINFER_INLINE void add_block(const Sums (&held)[kHeld], int64_t last, const float* scales, const IntegerTile& x, int64_t b, F32 (&total)[kRows]) {
  using Form = Integers<C>;
  constexpr float unit = is_affine(C) ? 1.0f : 0.5f;
  constexpr int groups = has_halves(C) ? 2 : 1;
  const int32_t* code_sums = x.code_sums + 2 * b * kRows;
  F32 scale[groups], bias[groups];
  MLXINFER_UNROLL
  for (int g = 0; g < groups; ++g) {
    scale[g] = load(scales + 2 * g * kPanelRows);
    bias[g] = load(scales + (2 * g + 1) * kPanelRows);
  }
  MLXINFER_UNROLL
  for (int m = 0; m < kRows; ++m) {
    const float step = x.scales[b * kRows + m] * unit;
    MLXINFER_UNROLL
    for (int g = 0; g < groups; ++g) {
      const Sums& sums = held[(last + 1 - groups + g) % kHeld];
      I32 sum = load_bits<I32>(sums[Planes - 1][m]);
      if constexpr (Form::kOffset != 0) {
        sum += broadcast(Form::kOffset * (groups == 2 ? code_sums[g * kRows + m] : code_sums[m] + code_sums[kRows + m]));
      }
      if constexpr (Planes == 2) {
        sum += load_bits<I32>(sums[0][m]) << 7;
      }
      total[m] = fma(to_float(sum), scale[g] * step, total[m]);
    }
    if constexpr (is_affine(C)) {
      MLXINFER_UNROLL
      for (int g = 0; g < groups; ++g) {
        total[m] = fma(bias[g], broadcast(groups == 2 ? x.half_sums[(2 * b + g) * kRows + m] : x.sums[b * kRows + m]), total[m]);
      }
    }
  }
}

// A product takes long until it can be stored, and what is stored until it can be read: step t is multiplied, the one before it
// stored, and what was stored before that is added.
template <Code C, int Planes, int Set>
MLXINFER_AMX MLXINFER_INLINE void run_step(const SpreadPanel& panel, const IntegerTile& x, int64_t t, Sums (&held)[kHeld], F32 (&total)[kRows]) {
  constexpr int groups = has_halves(C) ? 2 : 1;
  const int64_t steps = panel.block_count * groups;
  if (t < steps) {
    const int8_t* q = reinterpret_cast<const int8_t*>(x.q) + t / groups * Planes * kRows * kBlockColumns + t % groups * (kBlockColumns / 2);
    prefetch<Planes * kRows * kBlockColumns / groups>(reinterpret_cast<const uint8_t*>(q) + kAhead * Planes * kRows * kBlockColumns);
    multiply_step<Set, Planes>(panel.codes + t * (kSpreadBlockBytes / groups), q);
  }
  if (t >= 1 && t <= steps) {
    store_step<1 - Set, Planes>(held[(t - 1) % kHeld]);
  }
  const int64_t last = t - 2, block = last / groups;
  if ((groups == 1 || Set == 1) && last >= groups - 1 && block < panel.block_count) {
    add_block<C, Planes>(held, last, panel.scales + block * spread_scales(C), x, block, total);
  }
}

template <Code C, int Planes>
MLXINFER_AMX void tile(const SpreadPanel& panel, const IntegerTile& x, float* out) {
  constexpr int groups = has_halves(C) ? 2 : 1;
  static constexpr TileConfiguration shapes = configuration(kBlockColumns / groups);
  // Compilers believe that the intrinsic reads eight bytes.
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
  alignas(64) Sums held[kHeld];
  F32 total[kRows] = {};
  for (int64_t t = 0; t < panel.block_count * groups + 2; t += 2) {
    run_step<C, Planes, 0>(panel, x, t, held, total);
    run_step<C, Planes, 1>(panel, x, t + 1, held, total);
  }
  _tile_release();
  MLXINFER_UNROLL
  for (int m = 0; m < kRows; ++m) {
    store(out + m * kPanelRows, total[m]);
  }
}

template <Code C>
void spread(const Panel& panel, const SpreadPanel& to) {
  using Form = Integers<C>;
  constexpr int groups = has_halves(C) ? 2 : 1;
  Headers<C> headers(panel, 0);
  BlockScales group{};
  for (int64_t b = 0; b < panel.block_count; ++b) {
    if (b % panel.blocks_per_group == 0) {
      group = headers.next();
    }
    float* scales = to.scales + b * spread_scales(C);
    for (int g = 0; g < groups; ++g) {
      store(scales + 2 * g * kPanelRows, group.scale[g]);
      store(scales + (2 * g + 1) * kPanelRows, group.bias[g]);
    }
    const Codes codes = Form::unpack(panel.blocks + b * Form::kBits * 64, 0);
    for (int i = 0; i < 8; ++i) {
      store_bits(to.codes + b * kSpreadBlockBytes + i * 64, codes.v[i]);
    }
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_EACH_CODE_(kernel, ...)                                                                                                    \
  {MLXINFER_ISA::kernel<Code::affine1 __VA_ARGS__>, MLXINFER_ISA::kernel<Code::affine2 __VA_ARGS__>,                                        \
   MLXINFER_ISA::kernel<Code::affine3 __VA_ARGS__>, MLXINFER_ISA::kernel<Code::affine4 __VA_ARGS__>,                                        \
   MLXINFER_ISA::kernel<Code::affine5 __VA_ARGS__>, MLXINFER_ISA::kernel<Code::affine6 __VA_ARGS__>,                                        \
   MLXINFER_ISA::kernel<Code::affine8 __VA_ARGS__>, nullptr, nullptr, nullptr,                                                              \
   MLXINFER_ISA::kernel<Code::mxfp4 __VA_ARGS__>, MLXINFER_ISA::kernel<Code::nvfp4 __VA_ARGS__>, nullptr, nullptr, nullptr, nullptr}
MLXINFER_DEFINE_KERNELS(MatrixKernels, matrix_kernels) = {
    MLXINFER_EACH_CODE_(spread), {MLXINFER_EACH_CODE_(tile, , 1), MLXINFER_EACH_CODE_(tile, , 2)}};
}

#else
namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(MatrixKernels, matrix_kernels) = {};
}
#endif
