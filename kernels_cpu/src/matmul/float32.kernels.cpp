// Products of packed codes and of plain floats with float32 activations. As with 8 bits, a row's result does not depend on the tile.

#include "matmul/stream.h"
#include "matmul/tile.h"
#include "matmul/unpack.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// The 32 columns of a block: `at(v, j)` is column 4 v + j as float32 without the group's scale, where j is a constant.
template <Code C>
struct Columns {
  static constexpr int64_t kBlockBytes = code_bits(C) * 64;
  Codes codes;
  MLXINFER_INLINE Columns(const uint8_t* block, int sub) : codes(unpack_codes<code_bits(C)>(block, sub)) {
    if constexpr (C == Code::mxfp4 || C == Code::nvfp4) {
      MLXINFER_UNROLL
      for (auto& v : codes.v) {
        v = fp4_doubled<0>(v);
      }
    }
  }
  MLXINFER_INLINE F32 at(int v, int j) const {
    const U32 four = codes.v[v];
    const int shift = 8 * j;
    if constexpr (C == Code::mxfp8) {
      return from_e4m3((four >> shift) & 0xffu);
    } else if constexpr (C == Code::mxfp4 || C == Code::nvfp4) {
      return to_float((I32)(four << (24 - shift)) >> 24) * 0.5f;
    } else {
      return to_float((I32)((four >> shift) & 0xffu));
    }
  }
};

#if defined(__AVX512VNNI__)
// Sixteen values are looked up in a register.
template <>
struct Columns<Code::affine4> {
  static constexpr int64_t kBlockBytes = 256;
  U32 planes[4];
  F32 table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  MLXINFER_INLINE Columns(const uint8_t* block, int sub) {
    MLXINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      planes[i] = plane_vector(block, i, sub);
    }
  }
  MLXINFER_INLINE F32 at(int v, int j) const {
    const U32 four = planes[v / 2] >> (4 * (v % 2));
    return (F32)_mm512_permutexvar_ps((__m512i)(four >> (8 * j)), (__m512)table);
  }
};
#endif

template <typename T>
struct PlainColumns {
  static constexpr int64_t kBlockBytes = sizeof(T) * kPanelRows * kBlockColumns;
  const T* column;
  MLXINFER_INLINE PlainColumns(const uint8_t* block, int sub) : column(reinterpret_cast<const T*>(block) + sub * kWidth) {}
  MLXINFER_INLINE F32 at(int v, int j) const {
    return load(column + (4 * v + j) * kPanelRows);
  }
};
template <>
struct Columns<Code::f32> : PlainColumns<float> {
  using PlainColumns::PlainColumns;
};
template <>
struct Columns<Code::bf16> : PlainColumns<Bfloat> {
  using PlainColumns::PlainColumns;
};
template <>
struct Columns<Code::f16> : PlainColumns<Half> {
  using PlainColumns::PlainColumns;
};

// sums[m] += the products of four columns each from `from` to `to`.
template <Code C, int Rows>
MLXINFER_INLINE void add_products(const Columns<C>& columns, int from, int to, const float* x, F32 (&sums)[Rows]) {
  for (int v = from; v < to; ++v) {
    MLXINFER_UNROLL
    for (int j = 0; j < 4; ++j) {
      F32 w = columns.at(v, j);
      MLXINFER_UNROLL
      for (int m = 0; m < Rows; ++m) {
        sums[m] = fma(w, broadcast(x[(4 * v + j) * Rows + m]), sums[m]);
      }
    }
  }
}

// total + a block times a row of activations, from the sums of products with its halves.
template <Code C>
MLXINFER_INLINE F32 add_halves(F32 total, F32 first, F32 second, const BlockScales& group, float first_sum, float second_sum) {
  if constexpr (is_plain(C)) {
    total += first + second;
  } else if constexpr (has_halves(C)) {
    total = fma(group.scale[1], second, fma(group.scale[0], first, total));
  } else {
    total = fma(group.scale[0], first + second, total);
  }
  if constexpr (is_affine(C) && has_halves(C)) {
    total = fma(group.bias[1], broadcast(second_sum), fma(group.bias[0], broadcast(first_sum), total));
  } else if constexpr (is_affine(C)) {
    total = fma(group.bias[0], broadcast(first_sum + second_sum), total);
  }
  return total;
}

template <Code C, int Rows>
void tile(const Panel& panel, const FloatTile& x, float* out) {
  constexpr int together = kTogether<Rows>;
  PanelStream<Columns<C>::kBlockBytes> stream(panel);
  for (int start = 0; start < kSubs; start += together) {
    F32 total[together][Rows] = {};
    Headers<C, together> headers(panel, start);
    const uint8_t* block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      BlockScales groups[together] = {};
      headers.next(groups);
      for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += Columns<C>::kBlockBytes) {
        if (Rows == 1) {
          stream.step();
        } else if (Rows <= 8 && start == 0) {
          prefetch<64>(headers.at() + panel.ahead);
          prefetch<Columns<C>::kBlockBytes>(block + panel.ahead);
        }
        const float *values = x.x + b * kBlockColumns * Rows, *sums = x.sums + 2 * b * Rows;
        MLXINFER_UNROLL
        for (int sub = 0; sub < together; ++sub) {
          const Columns<C> columns(block, start + sub);
          F32 first[Rows] = {}, second[Rows] = {}; // halves, so that additions wait less for one another
          add_products<C, Rows>(columns, 0, 4, values, first);
          add_products<C, Rows>(columns, 4, 8, values, second);
          MLXINFER_UNROLL
          for (int m = 0; m < Rows; ++m) {
            total[sub][m] = add_halves<C>(total[sub][m], first[m], second[m], groups[sub], sums[m], sums[Rows + m]);
          }
        }
      }
    }
    MLXINFER_UNROLL
    for (int sub = 0; sub < together; ++sub) {
      MLXINFER_UNROLL
      for (int m = 0; m < Rows; ++m) {
        store(out + m * kPanelRows + (start + sub) * kWidth, total[sub][m]);
      }
    }
  }
}

template <Code C>
void careful(const Panel& panel, const FloatTile& x, float* out) {
  for (int sub = 0; sub < kSubs; ++sub) {
    F32 total = {};
    Headers<C> headers(panel, sub);
    const uint8_t* block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      const BlockScales group = headers.next();
      for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += Columns<C>::kBlockBytes) {
        const Columns<C> columns(block, sub);
        MLXINFER_ROLL
        for (int v = 0; v < kBlockColumns / 4; ++v) {
          const int half = has_halves(C) && v >= kBlockColumns / 8 ? 1 : 0;
          MLXINFER_UNROLL
          for (int j = 0; j < 4; ++j) {
            F32 w = columns.at(v, j);
            if constexpr (is_affine(C)) {
              w = fma(w, group.scale[half], group.bias[half]);
            } else if constexpr (!is_plain(C)) {
              w *= group.scale[half];
            }
            total = fma(w, broadcast(x.x[b * kBlockColumns + 4 * v + j]), total);
          }
        }
      }
    }
    store(out + sub * kWidth, total);
  }
}

template <Code C, int Rows>
constexpr FloatKernel kernel() {
  if constexpr (has_tile(C, 0, Rows, kLargestTile)) {
    return tile<C, Rows>;
  } else {
    return nullptr;
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_EACH_CODE_(X) \
  X(affine1), X(affine2), X(affine3), X(affine4), X(affine5), X(affine6), X(affine8), X(halves2), X(halves3), X(halves6), X(mxfp4), \
  X(nvfp4), X(mxfp8), X(f32), X(bf16), X(f16)
#define MLXINFER_TILES_(code)                                                                                            \
  {MLXINFER_ISA::kernel<Code::code, 1>(), MLXINFER_ISA::kernel<Code::code, 2>(), MLXINFER_ISA::kernel<Code::code, 3>(), \
   MLXINFER_ISA::kernel<Code::code, 4>(), MLXINFER_ISA::kernel<Code::code, 8>(), MLXINFER_ISA::kernel<Code::code, 16>()}
#define MLXINFER_CAREFUL_(code) MLXINFER_ISA::careful<Code::code>
MLXINFER_DEFINE_KERNELS(FloatKernels, float_kernels) = {
    {MLXINFER_EACH_CODE_(MLXINFER_TILES_)}, {MLXINFER_EACH_CODE_(MLXINFER_CAREFUL_)}};
}
