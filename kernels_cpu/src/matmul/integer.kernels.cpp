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
        const int32_t* q = x.q + b * 8 * Planes * Rows;
        const int32_t* sums = x.code_sums + 2 * b * Rows;
        MLXINFER_UNROLL
        for (int m = 0; m < Rows; ++m) {
          const int64_t at = b * Rows + m;
          if constexpr (C == Code::nvfp4) {
            F32 first_half = products<Form, Planes, 0, 4>(codes, q + m, Rows, sums[m]);
            F32 second_half = products<Form, Planes, 4, 4>(codes, q + m, Rows, sums[Rows + m]);
            total[m] = fma(first_half, scale * x.scales[at], total[m]);
            total[m] = fma(second_half, second * x.scales[at], total[m]);
          } else {
            F32 both = products<Form, Planes, 0, 8>(codes, q + m, Rows, Form::kOffset == 0 ? 0 : sums[m] + sums[Rows + m]);
            total[m] = fma(both, scale * x.scales[at], total[m]);
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
#define MLXINFER_TILES_(code, planes)                                                                                           \
  {MLXINFER_ISA::tile<Code::code, planes, 1>, MLXINFER_ISA::tile<Code::code, planes, 2>, MLXINFER_ISA::tile<Code::code, planes, 4>, \
   MLXINFER_ISA::tile<Code::code, planes, 8>, MLXINFER_ISA::tile<Code::code, planes, 16>}
#define MLXINFER_CODES_(planes)                                                                             \
  {MLXINFER_TILES_(affine1, planes), MLXINFER_TILES_(affine2, planes), MLXINFER_TILES_(affine3, planes), \
   MLXINFER_TILES_(affine4, planes), MLXINFER_TILES_(affine5, planes), MLXINFER_TILES_(affine6, planes), \
   MLXINFER_TILES_(affine8, planes), MLXINFER_TILES_(mxfp4, planes), MLXINFER_TILES_(nvfp4, planes), {}, {}, {}, {}}
MLXINFER_DEFINE_KERNELS(IntegerKernels, integer_kernels) = {{MLXINFER_CODES_(1), MLXINFER_CODES_(2)}};
}
