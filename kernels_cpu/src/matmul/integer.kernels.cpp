// Products of packed codes with integer activations. Every element of the result is computed by the same operations in the same
// order whatever the tile, so that a row's result does not depend on the rows beside it.

#include "matmul/dot.h"
#include "matmul/tile.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// The sum over vectors [From, From + Count) of codes times q, where `sum` is that of those q.
template <typename Form, int Planes, int From, int Count>
MLXINFER_INLINE F32 products(const Codes& codes, const int32_t* q, int rows, int32_t sum) {
  const I32 start = broadcast(Form::kOffset * sum);
  if constexpr (Planes == 1) {
    return to_float(dot<Form, From, Count>(start, codes, q, rows));
  } else {
    I32 low = dot<Form, From, Count>(start, codes, q + 8 * rows, rows), high = dot<Form, From, Count>(I32{}, codes, q, rows);
    return to_float((high << 7) + low);
  }
}

template <Code C, int Planes, int Rows>
void tile(const Panel& panel, const IntegerTile& x, float* out) {
  using Form = Integers<C>;
  constexpr float unit = is_affine(C) ? 1.0f : 0.5f; // values of four-bit floats are doubled
  constexpr int64_t block_bytes = Form::kBits * 64;
  for (int sub = 0; sub < kSubs; ++sub) {
    F32 total[Rows] = {};
    Headers<C> headers(panel, sub);
    const uint8_t* block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      if (Rows <= 8 && sub == 0) {
        prefetch<128>(headers.at() + panel.ahead);
      }
      const BlockScales group = headers.next();
      for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += block_bytes) {
        if (Rows <= 8 && sub == 0) {
          prefetch<block_bytes>(block + panel.ahead);
        }
        const Codes codes = Form::unpack(block, sub);
        const int32_t* q = x.q + b * 8 * Planes * Rows;
        const int32_t* sums = x.code_sums + 2 * b * Rows;
        const float* halves = x.half_sums + 2 * b * Rows;
        MLXINFER_UNROLL
        for (int m = 0; m < Rows; ++m) {
          const float scale = x.scales[b * Rows + m] * unit;
          if constexpr (has_halves(C)) {
            F32 first = products<Form, Planes, 0, 4>(codes, q + m, Rows, sums[m]);
            F32 second = products<Form, Planes, 4, 4>(codes, q + m, Rows, sums[Rows + m]);
            total[m] = fma(first, group.scale[0] * scale, total[m]);
            total[m] = fma(second, group.scale[1] * scale, total[m]);
            if constexpr (is_affine(C)) {
              total[m] = fma(group.bias[0], broadcast(halves[m]), total[m]);
              total[m] = fma(group.bias[1], broadcast(halves[Rows + m]), total[m]);
            }
          } else {
            F32 both = products<Form, Planes, 0, 8>(codes, q + m, Rows, Form::kOffset == 0 ? 0 : sums[m] + sums[Rows + m]);
            total[m] = fma(both, group.scale[0] * scale, total[m]);
            if constexpr (is_affine(C)) {
              total[m] = fma(group.bias[0], broadcast(x.sums[b * Rows + m]), total[m]);
            }
          }
        }
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
#define MLXINFER_CODES_(planes)                                                                             \
  {MLXINFER_TILES_(affine1, planes), MLXINFER_TILES_(affine2, planes), MLXINFER_TILES_(affine3, planes), \
   MLXINFER_TILES_(affine4, planes), MLXINFER_TILES_(affine5, planes), MLXINFER_TILES_(affine6, planes), \
   MLXINFER_TILES_(affine8, planes), {}, {}, {}, MLXINFER_TILES_(mxfp4, planes), MLXINFER_TILES_(nvfp4, planes), {}, {}, {}, {}}
MLXINFER_DEFINE_KERNELS(IntegerKernels, integer_kernels) = {{MLXINFER_CODES_(1), MLXINFER_CODES_(2)}};
}
