#include "matmul/rows.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "matmul/convert.h"

namespace mlxinfer::cpu {
namespace {

float e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  value = magnitude == 0x7f ? std::numeric_limits<float>::quiet_NaN() : value;
  return code & 0x80u ? -value : value;
}

float e8m0(uint8_t code) {
  return std::bit_cast<float>(code == 0 ? 0x400000u : static_cast<uint32_t>(code) << 23);
}

float e2m1(int code) {
  constexpr float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8 ? -values[code & 7] : values[code];
}

template <typename T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

float scale_at(const uint8_t* scales, Scale scale, int row) {
  switch (scale) {
    case Scale::f32:
      return read<float>(scales + row * 4);
    case Scale::f16:
      return half_to_float(read<uint16_t>(scales + row * 2));
    case Scale::bf16:
      return bfloat_to_float(read<uint16_t>(scales + row * 2));
    case Scale::e8m0:
      return e8m0(scales[row]);
    default:
      return e4m3(scales[row]);
  }
}

// The code of a row and column of a block, from its planes.
int code_at(const uint8_t* block, int bits, int row, int column) {
  const int vector = column / 4, byte = column % 4;
  auto lane = [&](int index) { return block[(index * kPanelRows + row) * 4 + byte]; };
  if (bits == 8) {
    return lane(vector);
  }
  int code = 0, index = 0, low = 0;
  for (int plane : {4, 2, 1}) {
    if (bits & plane) {
      const int per_lane = 8 / plane;
      code |= (lane(index + vector / per_lane) >> (vector % per_lane * plane) & ((1 << plane) - 1)) << low;
      index += plane;
      low += plane;
    }
  }
  return code;
}

float plain_at(const Layout& l, const uint8_t* blocks, int row, int64_t column) {
  const int64_t at = column * kPanelRows + row;
  if (l.code == Code::f32) {
    return read<float>(blocks + at * 4);
  }
  const auto bits = read<uint16_t>(blocks + at * 2);
  return l.code == Code::f16 ? half_to_float(bits) : bfloat_to_float(bits);
}

struct GroupScale {
  float scale, bias;
};

GroupScale group_scale(const Layout& l, const uint8_t* panel, int64_t g, int row) {
  const uint8_t* header = panel + l.group_header_offset(g);
  const uint8_t* second = header + l.scales_bytes();
  GroupScale group{};
  if (l.scale == Scale::nested) {
    const uint8_t* nest = panel + l.group_header_offset(g - g % (kNestColumns / l.group)) - l.nest_header_bytes();
    auto value = [row](const uint8_t* units, const uint8_t* counts) {
      return scale_at(units, Scale::f16, row) * static_cast<float>(static_cast<int8_t>(counts[row]));
    };
    group.scale = value(nest, header);
    group.bias = l.has_biases() ? value(nest + 2 * kPanelRows, second) : 0.0f;
  } else {
    group.scale = scale_at(header, l.scale, row);
    group.bias = l.has_biases() ? scale_at(second, l.scale, row) : 0.0f;
  }
  group.bias = l.zero == 0 ? group.bias : group.scale * static_cast<float>(-l.zero);
  return group;
}

} // namespace

void read_row(const Layout& l, const uint8_t* weights, int64_t row, float* out) {
  const uint8_t* panel = weights + row / kPanelRows * l.panel_bytes();
  const uint8_t* blocks = panel + l.header_bytes();
  const int lane = static_cast<int>(row % kPanelRows);
  if (l.is_plain()) {
    for (int64_t c = 0; c < l.k; ++c) {
      out[c] = plain_at(l, blocks, lane, c);
    }
    return;
  }
  for (int64_t g = 0; g < l.groups(); ++g) {
    const GroupScale group = group_scale(l, panel, g, lane);
    for (int64_t c = g * l.group; c < (g + 1) * l.group; ++c) {
      const int code = code_at(blocks + c / kBlockColumns * l.block_bytes(), l.bits(), lane, static_cast<int>(c % kBlockColumns));
      out[c] = l.is_affine() ? std::fma(group.scale, static_cast<float>(code), group.bias)
                             : group.scale * (l.code == Code::mxfp8 ? e4m3(static_cast<uint8_t>(code)) : e2m1(code));
    }
  }
}

} // namespace mlxinfer::cpu
