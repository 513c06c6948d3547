// Products of packed codes and of plain floats with float32 activations. As with 8 bits, a row's result does not depend on the tile.

#include "matmul/tile.h"
#include "matmul/unpack.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr bool is_plain(Code c) {
  return c >= Code::f32;
}
constexpr int bits_of(Code c) {
  return c <= Code::affine6 ? static_cast<int>(c) + 1 : c == Code::affine8 || c == Code::mxfp8 ? 8 : 4;
}

// The 32 columns of a block: `at(v, j)` is column 4 v + j as float32 without the group's scale, where j is a constant.
template <Code C>
struct Columns {
  static constexpr int64_t kBlockBytes = bits_of(C) * 64;
  Codes codes;
  MLXINFER_INLINE Columns(const uint8_t* block, int sub) : codes(unpack_codes<bits_of(C)>(block, sub)) {
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

struct GroupScale {
  F32 scale, second; // the bias of an affine group, the scale of the other half of a block for nvfp4
};

template <Code C>
MLXINFER_INLINE GroupScale next_scale(const uint8_t*& header, const Panel& panel, int sub) {
  GroupScale group = {};
  if constexpr (!is_plain(C)) {
    const int64_t bytes = static_cast<int64_t>(panel.scale_bytes) * kPanelRows;
    group.scale = load_scale(header, panel.scale, sub);
    header += bytes;
    if constexpr (C <= Code::affine8 || C == Code::nvfp4) {
      group.second = load_scale(header, panel.scale, sub);
      header += bytes;
    }
  }
  return group;
}

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

template <Code C, int Rows>
void tile(const Panel& panel, const FloatTile& x, float* out) {
  for (int sub = 0; sub < kSubs; ++sub) {
    F32 total[Rows] = {};
    const uint8_t *header = panel.headers, *block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      if (Rows <= 4 && sub == 0) {
        prefetch<128>(header + panel.ahead);
      }
      const GroupScale group = next_scale<C>(header, panel, sub);
      for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += Columns<C>::kBlockBytes) {
        if (Rows <= 4 && sub == 0) {
          prefetch<Columns<C>::kBlockBytes>(block + panel.ahead);
        }
        const Columns<C> columns(block, sub);
        const float *values = x.x + b * kBlockColumns * Rows, *sums = x.sums + b * Rows;
        F32 first[Rows] = {}, second[Rows] = {}; // halves, so that additions wait less for one another
        add_products<C, Rows>(columns, 0, 4, values, first);
        add_products<C, Rows>(columns, 4, 8, values, second);
        MLXINFER_UNROLL
        for (int m = 0; m < Rows; ++m) {
          if constexpr (is_plain(C)) {
            total[m] += first[m] + second[m];
          } else if constexpr (C == Code::nvfp4) {
            total[m] = fma(group.second, second[m], fma(group.scale, first[m], total[m]));
          } else {
            total[m] = fma(group.scale, first[m] + second[m], total[m]);
          }
          if constexpr (C <= Code::affine8) {
            total[m] = fma(group.second, broadcast(sums[m]), total[m]);
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

template <Code C>
void careful(const Panel& panel, const FloatTile& x, float* out) {
  for (int sub = 0; sub < kSubs; ++sub) {
    F32 total = {};
    const uint8_t *header = panel.headers, *block = panel.blocks;
    for (int64_t b = 0; b < panel.block_count;) {
      const GroupScale group = next_scale<C>(header, panel, sub);
      for (int64_t end = b + panel.blocks_per_group; b < end; ++b, block += Columns<C>::kBlockBytes) {
        const Columns<C> columns(block, sub);
        for (int i = 0; i < kBlockColumns; ++i) {
          F32 w = columns.at(i / 4, i % 4);
          if constexpr (C <= Code::affine8) {
            w = fma(w, group.scale, group.second);
          } else if constexpr (!is_plain(C)) {
            w *= C == Code::nvfp4 && i >= 16 ? group.second : group.scale;
          }
          total = fma(w, broadcast(x.x[b * kBlockColumns + i]), total);
        }
      }
    }
    store(out + sub * kWidth, total);
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_EACH_CODE_(X) \
  X(affine1), X(affine2), X(affine3), X(affine4), X(affine5), X(affine6), X(affine8), X(mxfp4), X(nvfp4), X(mxfp8), X(f32), X(bf16), X(f16)
#define MLXINFER_TILES_(code)                                                                                      \
  {MLXINFER_ISA::tile<Code::code, 1>, MLXINFER_ISA::tile<Code::code, 2>, MLXINFER_ISA::tile<Code::code, 4>, \
   MLXINFER_ISA::tile<Code::code, 8>, MLXINFER_ISA::tile<Code::code, 16>}
#define MLXINFER_CAREFUL_(code) MLXINFER_ISA::careful<Code::code>
MLXINFER_DEFINE_KERNELS(FloatKernels, float_kernels) = {
    {MLXINFER_EACH_CODE_(MLXINFER_TILES_)}, {MLXINFER_EACH_CODE_(MLXINFER_CAREFUL_)}};
}
