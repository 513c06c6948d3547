#pragma once

#include <stdint.h>

namespace mlxinfer::cpu {

// How a matrix `[n, k]` lies in memory after packing. 16 rows make a panel, 32 columns of a panel a block, so that one vector holds the
// same columns of neighbouring rows and products need no sums across lanes. A panel is
//   headers: for each group along k, 16 scales, then (with biases) 16 biases; padded to 64 bytes. Nested scales are bytes that
//     count multiples of a float16, which stands, for 16 scales and then 16 biases, before the groups of each 256 columns
//   blocks: 32 columns each. Codes lie in planes of 4, 2 and 1 bits (5 bits are 4 + 1). A 32-bit lane belongs to a row and holds,
//     in each byte and at each position within it, the plane's bits of one column: unpacking gives 8 vectors of 4 columns per
//     row in rising order. Plain floats lie column by column, 16 rows each.
// Rows beyond n and columns beyond k are zero.
constexpr int kPanelRows = 16;
constexpr int kBlockColumns = 32;

constexpr int kNestColumns = 256, kNestBlocks = kNestColumns / kBlockColumns;

// Files with packed matrices outlive this program: another number for every change of what lies where.
constexpr int kPackedVersion = 1;

// Affine codes with groups of 16, half a block, are `halves`.
enum class Code : int {
  affine1, affine2, affine3, affine4, affine5, affine6, affine8, halves2, halves3, halves6, mxfp4, nvfp4, mxfp8, f32, bf16, f16
};
constexpr int kCodes = 16;

constexpr bool is_affine(Code c) {
  return c <= Code::halves6;
}
constexpr bool is_plain(Code c) {
  return c >= Code::f32;
}
// Whether the halves of a block have scales of their own.
constexpr bool has_halves(Code c) {
  return (c >= Code::halves2 && c <= Code::halves6) || c == Code::nvfp4;
}
// Whether nested scales come with biases; where not, a code means zero.
constexpr bool nest_has_biases(Code c) {
  return c != Code::halves3 && c != Code::halves6;
}
constexpr int code_bits(Code c) {
  constexpr int bits[kCodes] = {1, 2, 3, 4, 5, 6, 8, 2, 3, 6, 4, 4, 8, 32, 16, 16};
  return bits[static_cast<int>(c)];
}

// What activations become before they are multiplied with codes: nothing, or integers of 15 or 8 bits with a scale per 32 columns. Where
// scales are nested, these are 16 or 8 bits with a scale per 256 columns.
enum class Precision : int { f32, int16, int8 };

enum class Scale : int { none, f32, bf16, f16, e8m0, e4m3, nested };

struct Layout {
  Code code;
  Scale scale;
  int group; // columns that share a scale; 32 for plain floats
  int zero; // affine without biases: the code that means zero; otherwise 0
  int64_t n, k;

  int bits() const {
    return code_bits(code);
  }
  bool is_affine() const {
    return cpu::is_affine(code);
  }
  bool is_plain() const {
    return cpu::is_plain(code);
  }
  bool has_biases() const {
    return is_affine() && zero == 0;
  }
  // Whether products with integer activations exist; otherwise they stay float32.
  bool has_integers() const {
    return code <= Code::nvfp4;
  }
  int64_t panels() const {
    return (n + kPanelRows - 1) / kPanelRows;
  }
  int64_t blocks() const {
    return (k + kBlockColumns - 1) / kBlockColumns;
  }
  int64_t groups() const {
    return is_plain() ? 0 : k / group;
  }
  int64_t block_bytes() const {
    return int64_t{bits()} * kPanelRows * kBlockColumns / 8;
  }
  int64_t scale_bytes() const {
    return scale == Scale::none ? 0 : scale == Scale::f32 ? 4 : scale <= Scale::f16 ? 2 : 1;
  }
  // Where the biases begin after the scales of a group.
  int64_t scales_bytes() const {
    return scale_bytes() * kPanelRows;
  }
  int64_t group_header_bytes() const {
    return scales_bytes() * (has_biases() ? 2 : 1);
  }
  // The float16s before the groups of 256 columns.
  int64_t nest_header_bytes() const {
    return scale == Scale::nested ? (has_biases() ? 4 : 2) * kPanelRows : 0;
  }
  int64_t group_header_offset(int64_t g) const {
    return g * group_header_bytes() + (g * group / kNestColumns + 1) * nest_header_bytes();
  }
  int64_t header_bytes() const {
    const int64_t nests = scale == Scale::nested ? k / kNestColumns : 0;
    return (groups() * group_header_bytes() + nests * nest_header_bytes() + 63) / 64 * 64;
  }
  int64_t panel_bytes() const {
    return header_bytes() + blocks() * block_bytes();
  }
};

} // namespace mlxinfer::cpu
