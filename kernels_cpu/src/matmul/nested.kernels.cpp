// Products of codes whose scales are nested with integer activations. The sums of 256 columns are integers, in which scales of groups
// count: they are the same whatever they are added up with and in which order (nested_matrix.kernels.cpp).

#include "matmul/dot.h"
#include "matmul/nest.h"
#include "matmul/tile.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <Code C, int Planes, int Rows>
void tile(const Panel& panel, const NestedTile& x, float* out) {
  using Form = Integers<C>;
  constexpr int halves = has_halves(C) ? 2 : 1;
  constexpr int64_t block_bytes = Form::kBits * 64;
  for (int sub = 0; sub < kSubs; ++sub) {
    F32 total[Rows] = {};
    NestHeaders<C> headers(panel.headers, sub);
    const uint8_t* block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      const F32 unit = headers.enter();
      const float* steps = x.scales + b / kNestBlocks * Rows;
      I32 sums[Planes][Rows] = {};
      for (const int64_t end = b + kNestBlocks; b < end; ++b, block += block_bytes) {
        if (Rows <= 8 && sub == 0) {
          prefetch<64>(headers.at() + panel.ahead);
          prefetch<block_bytes>(block + panel.ahead);
        }
        const Codes codes = Form::unpack(block, sub);
        MLXINFER_UNROLL
        for (int g = 0; g < halves; ++g) {
          const I32 scale = headers.scale();
          const F32 bias = headers.bias();
          const int64_t group = b * halves + g;
          const auto* q = reinterpret_cast<const int32_t*>(x.q) + b * 8 * Planes * Rows;
          MLXINFER_UNROLL
          for (int m = 0; m < Rows; ++m) {
            if constexpr (nest_has_biases(C)) {
              total[m] = fma(bias, broadcast(x.sums[group * Rows + m]), total[m]);
            }
            MLXINFER_UNROLL
            for (int plane = 0; plane < Planes; ++plane) {
              const I32 start = nest_has_biases(C) ? I32{} : broadcast(x.starts[(group * Planes + plane) * Rows + m]);
              const int32_t* lanes = q + plane * 8 * Rows + m;
              sums[plane][m] += scale * (halves == 1 ? dot<Form, 0, 8>(start, codes, lanes, Rows)
                                                     : g == 0 ? dot<Form, 0, 4>(start, codes, lanes, Rows) : dot<Form, 4, 4>(start, codes, lanes, Rows));
            }
          }
        }
      }
      MLXINFER_UNROLL
      for (int m = 0; m < Rows; ++m) {
        total[m] = fma(nest_sum<Planes>(sums[0][m], sums[Planes - 1][m]), unit * steps[m], total[m]);
      }
    }
    MLXINFER_UNROLL
    for (int m = 0; m < Rows; ++m) {
      store(out + m * kPanelRows + sub * kWidth, total[m]);
    }
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_TILES_(code, planes)                                                                                           \
  {MLXINFER_ISA::tile<Code::code, planes, 1>, MLXINFER_ISA::tile<Code::code, planes, 2>, MLXINFER_ISA::tile<Code::code, planes, 3>, \
   MLXINFER_ISA::tile<Code::code, planes, 4>, MLXINFER_ISA::tile<Code::code, planes, 8>, MLXINFER_ISA::tile<Code::code, planes, 16>}
#define MLXINFER_CODES_(planes)                                                                                                    \
  {{}, {}, {}, MLXINFER_TILES_(affine4, planes), MLXINFER_TILES_(affine5, planes), {}, {}, MLXINFER_TILES_(halves2, planes),       \
   MLXINFER_TILES_(halves3, planes), MLXINFER_TILES_(halves6, planes), {}, {}, {}, {}, {}, {}}
MLXINFER_DEFINE_KERNELS(NestedKernels, nested_kernels) = {{MLXINFER_CODES_(1), MLXINFER_CODES_(2)}};
}
