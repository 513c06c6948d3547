// Products of packed codes with activations of 8 bits. Every element of the result is computed by the same operations in the same
// order whatever the tile, so that a row's result does not depend on the rows beside it.

#include "matmul/dot.h"
#include "matmul/tile.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <Code C, int Rows>
void tile(const Panel& panel, const Int8Tile& x, float* out) {
  using Form = Integers<C>;
  constexpr bool affine = C <= Code::affine8;
  constexpr int64_t block_bytes = Form::kBits * 64;
  const int64_t scale_bytes = panel.scale_bytes * kPanelRows;
  for (int sub = 0; sub < kSubs; ++sub) {
    F32 total[Rows] = {};
    const uint8_t *header = panel.headers, *block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      if (Rows <= 4 && sub == 0) {
        prefetch<128>(header + panel.ahead);
      }
      F32 scale = load_scale(header, panel.scale, sub), second = {};
      header += scale_bytes;
      if constexpr (affine) {
        second = load_scale(header, panel.scale, sub);
        header += scale_bytes;
      } else if constexpr (C == Code::nvfp4) {
        scale *= 0.5f;
        second = load_scale(header, panel.scale, sub) * 0.5f;
        header += scale_bytes;
      } else {
        scale *= 0.5f;
      }
      for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += block_bytes) {
        if (Rows <= 4 && sub == 0) {
          prefetch<block_bytes>(block + panel.ahead);
        }
        Codes codes = Form::unpack(block, sub);
        const int32_t* q = x.q + b * 8 * Rows;
        MLXINFER_UNROLL
        for (int m = 0; m < Rows; ++m) {
          const int64_t at = b * Rows + m;
          if constexpr (C == Code::nvfp4) {
            const int32_t* sums = x.code_sums + 2 * b * Rows + m;
            I32 first_half = dot<Form, 0, 4>(broadcast(Form::kOffset * sums[0]), codes, q + m, Rows);
            I32 second_half = dot<Form, 4, 4>(broadcast(Form::kOffset * sums[Rows]), codes, q + m, Rows);
            total[m] = fma(to_float(first_half), scale * x.scales[at], total[m]);
            total[m] = fma(to_float(second_half), second * x.scales[at], total[m]);
          } else {
            I32 start = broadcast(int32_t{0});
            if constexpr (Form::kOffset != 0) {
              const int32_t* sums = x.code_sums + 2 * b * Rows + m;
              start = broadcast(Form::kOffset * (sums[0] + sums[Rows]));
            }
            I32 products = dot<Form, 0, 8>(start, codes, q + m, Rows);
            total[m] = fma(to_float(products), scale * x.scales[at], total[m]);
            if constexpr (affine) {
              total[m] = fma(second, broadcast(x.sums[at]), total[m]);
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
#define MLXINFER_TILES_(code)                                                                                      \
  {MLXINFER_ISA::tile<Code::code, 1>, MLXINFER_ISA::tile<Code::code, 2>, MLXINFER_ISA::tile<Code::code, 4>, \
   MLXINFER_ISA::tile<Code::code, 8>, MLXINFER_ISA::tile<Code::code, 16>}
MLXINFER_DEFINE_KERNELS(Int8Kernels, int8_kernels) = {
    {MLXINFER_TILES_(affine1), MLXINFER_TILES_(affine2), MLXINFER_TILES_(affine3), MLXINFER_TILES_(affine4), MLXINFER_TILES_(affine5),
     MLXINFER_TILES_(affine6), MLXINFER_TILES_(affine8), MLXINFER_TILES_(mxfp4), MLXINFER_TILES_(nvfp4), {}, {}, {}, {}}};
}
