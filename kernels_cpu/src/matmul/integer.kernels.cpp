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
          MLXINFER_UNROLL
          for (int m = 0; m < Rows; ++m) {
            total[sub][m] = add_block<C, Planes, Rows>(total[sub][m], codes, groups[sub], x, b, m);
          }
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

#if MLXINFER_WIDTH == 8
// As a number: the sum over two planes is 128 times the first one and the second one.
template <int Planes>
MLXINFER_INLINE F32 number(const I32 (&sums)[Planes]) {
  return to_float(Planes == 1 ? sums[0] : (sums[0] << 7) + sums[Planes - 1]);
}

// What `add_block` does with the sums of both halves of a block, or with those of the whole block in `second`.
template <Code C, int Planes, int Rows>
MLXINFER_INLINE F32 add_sums(
    F32 total, const I32 (&first)[Planes], const I32 (&second)[Planes], const BlockScales& group, const IntegerTile& x, int64_t b, int m) {
  constexpr float unit = is_affine(C) ? 1.0f : 0.5f;
  const float scale = x.scales[b * Rows + m] * unit;
  if constexpr (has_halves(C)) {
    total = fma(number(first), group.scale[0] * scale, total);
    total = fma(number(second), group.scale[1] * scale, total);
    static_assert(!is_affine(C), "halves with biases have nested scales");
  } else {
    total = fma(number(second), group.scale[0] * scale, total);
    if constexpr (is_affine(C)) {
      total = fma(group.bias[0], broadcast(x.sums[b * Rows + m]), total);
    }
  }
  return total;
}

// The products of vectors [From, From + 4) of a block with all rows of a tile: those of the first half become `first`, those of the second
// half join them in `total`, in the order of `add_block`.
template <Code C, int Planes, int Rows, int From>
MLXINFER_INLINE void add_half(
    const uint8_t* block, const IntegerTile& x, int64_t b, I32 (&first)[Rows][kSubs][Planes], const BlockScales* groups,
    F32 (*total)[kSubs]) {
  using Form = Integers<C>;
  const Codes codes[kSubs] = {Form::unpack(block, 0), Form::unpack(block, 1)};
  MLXINFER_ROLL
  for (int m = 0; m < Rows; ++m) {
    const int32_t *q = x.q + b * 8 * Planes * Rows + m, *code_sums = x.code_sums + (2 * b + From / 4) * Rows + m;
    I32 sums[kSubs][Planes];
    MLXINFER_UNROLL
    for (int plane = 0; plane < Planes; ++plane) {
      MLXINFER_UNROLL
      for (int sub = 0; sub < kSubs; ++sub) {
        I32 start = plane == Planes - 1 ? broadcast(Form::kOffset * *code_sums) : I32{};
        if constexpr (From != 0 && !has_halves(C)) {
          start += first[m][sub][plane];
        }
        sums[sub][plane] = dot<Form, From, 4>(start, codes[sub], q + plane * 8 * Rows, Rows);
      }
    }
    MLXINFER_UNROLL
    for (int sub = 0; sub < kSubs; ++sub) {
      if constexpr (From == 0) {
        MLXINFER_UNROLL
        for (int plane = 0; plane < Planes; ++plane) {
          first[m][sub][plane] = sums[sub][plane];
        }
      } else {
        total[m][sub] = add_sums<C, Planes, Rows>(total[m][sub], first[m][sub], sums[sub], groups[sub], x, b, m);
      }
    }
  }
}

// `tile` for both parts of a panel's rows at once: a value of the activations, in all lanes, meets the codes of both. 16 registers hold the
// codes of half a block, so that one half is multiplied with all rows before the other.
template <Code C, int Planes, int Rows>
void wide_tile(const Panel& panel, const IntegerTile& x, float* out) {
  using Form = Integers<C>;
  constexpr int64_t block_bytes = Form::kBits * 64;
  F32 total[Rows][kSubs] = {};
  Headers<C, kSubs> headers(panel, 0);
  const uint8_t* block = panel.blocks;
  for (int64_t b = 0; b < panel.block_count;) {
    BlockScales groups[kSubs];
    headers.next(groups);
    for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += block_bytes) {
      if (Rows <= 8) {
        prefetch<64>(headers.at() + panel.ahead);
        prefetch<block_bytes>(block + panel.ahead);
      }
      I32 first[Rows][kSubs][Planes];
      add_half<C, Planes, Rows, 0>(block, x, b, first, nullptr, nullptr);
      __asm__ volatile("" : : : "memory"); // else compilers unpack the other half before, and keep neither in registers
      add_half<C, Planes, Rows, 4>(block, x, b, first, groups, total);
    }
  }
  for (int m = 0; m < Rows; ++m) {
    for (int sub = 0; sub < kSubs; ++sub) {
      store(out + m * kPanelRows + sub * kWidth, total[m][sub]);
    }
  }
}
#endif

template <Code C, int Planes, int Rows>
constexpr IntegerKernel kernel() {
  if constexpr (has_tile(C, Planes, Rows, kMostTileRows)) {
#if MLXINFER_WIDTH == 8
    if constexpr (Rows > 1) {
      return wide_tile<C, Planes, Rows>;
    } else {
      return tile<C, Planes, Rows>;
    }
#else
    return tile<C, Planes, Rows>;
#endif
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
