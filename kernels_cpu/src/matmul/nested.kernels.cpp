// Products of codes whose scales are nested with integer activations. The sums of 256 columns are integers, in which scales of groups
// count: they are the same whatever they are added up with and in which order (nested_matrix.kernels.cpp).

#include "matmul/dot.h"
#include "matmul/nest.h"
#include "matmul/stream.h"
#include "matmul/tile.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// The scales of a block's groups, for one part of a panel's rows.
template <int Halves>
struct NestScales {
  I32 scale[Halves];
  F32 bias[Halves];
};

// What a block adds to the sums of 256 columns and to the total of a row of activations, `m` of Rows.
template <Code C, int Planes, int Rows, int Halves>
MLXINFER_INLINE void add_block(
    const Codes& codes, const NestScales<Halves>& scales, const NestedTile& x, int64_t b, int m, I32 (&sums)[Planes][Rows], F32& total) {
  using Form = Integers<C>;
  MLXINFER_UNROLL
  for (int g = 0; g < Halves; ++g) {
    const int64_t group = b * Halves + g;
    if constexpr (nest_has_biases(C)) {
      total = fma(scales.bias[g], broadcast(x.sums[group * Rows + m]), total);
    }
    MLXINFER_UNROLL
    for (int plane = 0; plane < Planes; ++plane) {
      const I32 start = nest_has_biases(C) ? I32{} : broadcast(x.starts[(group * Planes + plane) * Rows + m]);
      const int32_t* q = reinterpret_cast<const int32_t*>(x.q) + (b * Planes + plane) * 8 * Rows + m;
      sums[plane][m] += scales.scale[g] * (Halves == 1 ? dot<Form, 0, 8>(start, codes, q, Rows)
                                                       : g == 0 ? dot<Form, 0, 4>(start, codes, q, Rows) : dot<Form, 4, 4>(start, codes, q, Rows));
    }
  }
}

template <Code C, int Planes, int Rows>
void tile(const Panel& panel, const NestedTile& x, float* out) {
  using Form = Integers<C>;
  constexpr int halves = has_halves(C) ? 2 : 1, together = kTogether<Rows>;
  constexpr int64_t block_bytes = Form::kBits * 64;
  PanelStream<block_bytes> stream(panel);
  for (int first = 0; first < kSubs; first += together) {
    F32 total[together][Rows] = {};
    NestHeaders<C, together> headers(panel.headers, first);
    const uint8_t* block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      F32 units[together];
      headers.enter(units);
      const float* steps = x.scales + b / kNestBlocks * Rows;
      I32 sums[together][Planes][Rows] = {};
      for (const int64_t end = b + kNestBlocks; b < end; ++b, block += block_bytes) {
        if (Rows == 1) {
          stream.step();
        } else if (Rows <= 8 && first == 0) {
          prefetch<64>(headers.at() + panel.ahead);
          prefetch<block_bytes>(block + panel.ahead);
        }
        NestScales<halves> scales[together];
        MLXINFER_UNROLL
        for (int g = 0; g < halves; ++g) {
          I32 counts[together];
          F32 biases[together] = {};
          headers.scales(counts);
          headers.biases(biases);
          MLXINFER_UNROLL
          for (int sub = 0; sub < together; ++sub) {
            scales[sub].scale[g] = counts[sub];
            scales[sub].bias[g] = biases[sub];
          }
        }
        MLXINFER_UNROLL
        for (int sub = 0; sub < together; ++sub) {
          const Codes codes = Form::unpack(block, first + sub);
          MLXINFER_UNROLL
          for (int m = 0; m < Rows; ++m) {
            add_block<C, Planes, Rows, halves>(codes, scales[sub], x, b, m, sums[sub], total[sub][m]);
          }
        }
      }
      MLXINFER_UNROLL
      for (int sub = 0; sub < together; ++sub) {
        MLXINFER_UNROLL
        for (int m = 0; m < Rows; ++m) {
          total[sub][m] = fma(nest_sum<Planes>(sums[sub][0][m], sums[sub][Planes - 1][m]), units[sub] * steps[m], total[sub][m]);
        }
      }
    }
    MLXINFER_UNROLL
    for (int sub = 0; sub < together; ++sub) {
      MLXINFER_UNROLL
      for (int m = 0; m < Rows; ++m) {
        store(out + m * kPanelRows + (first + sub) * kWidth, total[sub][m]);
      }
    }
  }
}

template <Code C, int Planes, int Rows>
constexpr NestedKernel kernel() {
  if constexpr (has_tile(C, Planes, Rows, kMostTileRows)) {
    return tile<C, Planes, Rows>;
  } else {
    return nullptr;
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_TILES_(code, planes)                                                                                     \
  {MLXINFER_ISA::kernel<Code::code, planes, 1>(), MLXINFER_ISA::kernel<Code::code, planes, 2>(),                         \
   MLXINFER_ISA::kernel<Code::code, planes, 3>(), MLXINFER_ISA::kernel<Code::code, planes, 4>(),                         \
   MLXINFER_ISA::kernel<Code::code, planes, 8>(), MLXINFER_ISA::kernel<Code::code, planes, 16>()}
#define MLXINFER_CODES_(planes)                                                                                                    \
  {{}, {}, {}, MLXINFER_TILES_(affine4, planes), MLXINFER_TILES_(affine5, planes), {}, {}, MLXINFER_TILES_(halves2, planes),       \
   MLXINFER_TILES_(halves3, planes), MLXINFER_TILES_(halves6, planes), {}, {}, {}, {}, {}, {}}
MLXINFER_DEFINE_KERNELS(NestedKernels, nested_kernels) = {{MLXINFER_CODES_(1), MLXINFER_CODES_(2)}};
}
