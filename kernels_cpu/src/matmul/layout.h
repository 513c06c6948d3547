#pragma once

#include <stdint.h>

namespace mlxinfer::cpu {

// How a matrix `[n, k]` lies in memory after packing. 16 rows make a panel, 32 columns of a panel a block, so that one vector holds the
// same columns of neighbouring rows and products need no sums across lanes. A panel is
//   headers: for each group along k, 16 scales, then (affine) 16 biases; padded to 64 bytes
//   blocks: 32 columns each. Codes lie in planes of 4, 2 and 1 bits (5 bits are 4 + 1). A 32-bit lane belongs to a row and holds,
//     in each byte and at each position within it, the plane's bits of one column: unpacking gives 8 vectors of 4 columns per
//     row in rising order. Plain floats lie column by column, 16 rows each.
// Rows beyond n and columns beyond k are zero.
constexpr int kPanelRows = 16;
constexpr int kBlockColumns = 32;

enum class Code : int { affine1, affine2, affine3, affine4, affine5, affine6, affine8, mxfp4, nvfp4, mxfp8, f32, bf16, f16 };
constexpr int kCodes = 13;

// What activations become before they are multiplied with codes: nothing, or integers of 15 or 8 bits with a scale per 32 columns.
enum class Precision : int { f32, int16, int8 };

enum class Scale : int { none, f32, bf16, f16, e8m0, e4m3 };

struct Layout {
  Code code;
  Scale scale;
  int bits;
  int group; // columns that share a scale; 32 for plain floats
  int64_t n, k;

  bool is_affine() const {
    return code <= Code::affine8;
  }
  bool is_plain() const {
    return code >= Code::f32;
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
    return static_cast<int64_t>(bits) * kPanelRows * kBlockColumns / 8;
  }
  int64_t scale_bytes() const {
    return scale == Scale::none ? 0 : scale == Scale::f32 ? 4 : scale <= Scale::f16 ? 2 : 1;
  }
  int64_t group_header_bytes() const {
    return scale_bytes() * kPanelRows * (is_affine() ? 2 : 1);
  }
  int64_t header_bytes() const {
    return (groups() * group_header_bytes() + 63) / 64 * 64;
  }
  int64_t panel_bytes() const {
    return header_bytes() + blocks() * block_bytes();
  }
};

} // namespace mlxinfer::cpu
