// Products of packed codes with integer activations. Every element of the result is computed by the same operations in the same
// order whatever the tile, so that a row's result does not depend on the rows beside it.

#include "matmul/dot.h"
#include "matmul/stream.h"
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

// total += a block's codes times a row of activations, `m` of Rows.
template <Code C, int Planes, int Rows>
MLXINFER_INLINE F32 add_block(F32 total, const Codes& codes, const BlockScales& group, const IntegerTile& x, int64_t b, int m) {
  using Form = Integers<C>;
  constexpr float unit = is_affine(C) ? 1.0f : 0.5f; // values of four-bit floats are doubled
  const int32_t *q = x.q + b * 8 * Planes * Rows + m, *sums = x.code_sums + 2 * b * Rows + m;
  const float* halves = x.half_sums + 2 * b * Rows + m;
  const float scale = x.scales[b * Rows + m] * unit;
  if constexpr (has_halves(C)) {
    F32 first = products<Form, Planes, 0, 4>(codes, q, Rows, sums[0]);
    F32 second = products<Form, Planes, 4, 4>(codes, q, Rows, sums[Rows]);
    total = fma(first, group.scale[0] * scale, total);
    total = fma(second, group.scale[1] * scale, total);
    if constexpr (is_affine(C)) {
      total = fma(group.bias[0], broadcast(halves[0]), total);
      total = fma(group.bias[1], broadcast(halves[Rows]), total);
    }
  } else {
    F32 both = products<Form, Planes, 0, 8>(codes, q, Rows, Form::kOffset == 0 ? 0 : sums[0] + sums[Rows]);
    total = fma(both, group.scale[0] * scale, total);
    if constexpr (is_affine(C)) {
      total = fma(group.bias[0], broadcast(x.sums[b * Rows + m]), total);
    }
  }
  return total;
}

template <Code C, int Planes, int Rows>
void tile(const Panel& panel, const IntegerTile& x, float* out) {
  using Form = Integers<C>;
  constexpr int together = kTogether<Rows>;
  constexpr int64_t block_bytes = Form::kBits * 64;
  PanelStream<block_bytes> stream(panel);
  for (int first = 0; first < kSubs; first += together) {
    F32 total[together][Rows] = {};
    Headers<C, together> headers(panel, first);
    const uint8_t* block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      BlockScales groups[together];
      headers.next(groups);
      for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += block_bytes) {
        if (Rows == 1) {
          stream.step();
        } else if (Rows <= 8 && first == 0) {
          prefetch<64>(headers.at() + panel.ahead);
          prefetch<block_bytes>(block + panel.ahead);
        }
        MLXINFER_UNROLL
        for (int sub = 0; sub < together; ++sub) {
          const Codes codes = Form::unpack(block, first + sub);
          for_rows<C, Rows>([&](int m) __attribute__((always_inline)) {
            total[sub][m] = add_block<C, Planes, Rows>(total[sub][m], codes, groups[sub], x, b, m);
          });
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
constexpr IntegerKernel kernel() {
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
#define MLXINFER_CODES_(planes)                                                                             \
  {MLXINFER_TILES_(affine1, planes), MLXINFER_TILES_(affine2, planes), MLXINFER_TILES_(affine3, planes), \
   MLXINFER_TILES_(affine4, planes), MLXINFER_TILES_(affine5, planes), MLXINFER_TILES_(affine6, planes), \
   MLXINFER_TILES_(affine8, planes), {}, {}, {}, MLXINFER_TILES_(mxfp4, planes), MLXINFER_TILES_(nvfp4, planes), {}, {}, {}, {}}
MLXINFER_DEFINE_KERNELS(IntegerKernels, integer_kernels) = {{MLXINFER_CODES_(1), MLXINFER_CODES_(2)}};
}
