#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "matmul/layout.h"

namespace mlxinfer::cpu {

inline uint32_t four_bytes(const uint8_t* from) {
  uint32_t lanes;
  std::memcpy(&lanes, from, 4);
  return lanes;
}

inline void put_lane(uint8_t* block, int index, int row, uint32_t lanes) {
  std::memcpy(block + (index * kPanelRows + row) * 4, &lanes, 4);
}

// One row's 32 codes, a byte each, to the planes of a block; see layout.h and unpack.h.
template <int Bits>
void write_planes(const uint8_t* codes, int row, uint8_t* block) {
  if constexpr (Bits == 8) {
    for (int i = 0; i < 8; ++i) {
      put_lane(block, i, row, four_bytes(codes + 4 * i));
    }
    return;
  }
  int index = 0, low = 0;
  for (int plane : {4, 2, 1}) {
    if ((Bits & plane) == 0) {
      continue;
    }
    const int per_lane = 8 / plane;
    const auto mask = 0x01010101u * ((1u << plane) - 1);
    for (int i = 0; i < 8; i += per_lane) {
      uint32_t lanes = 0;
      for (int j = 0; j < per_lane; ++j) {
        lanes |= ((four_bytes(codes + 4 * (i + j)) >> low) & mask) << (j * plane);
      }
      put_lane(block, index++, row, lanes);
    }
    low += plane;
  }
}

inline void write_planes(const uint8_t* codes, int bits, int row, uint8_t* block) {
  switch (bits) {
    case 1:
      return write_planes<1>(codes, row, block);
    case 2:
      return write_planes<2>(codes, row, block);
    case 3:
      return write_planes<3>(codes, row, block);
    case 4:
      return write_planes<4>(codes, row, block);
    case 5:
      return write_planes<5>(codes, row, block);
    case 6:
      return write_planes<6>(codes, row, block);
    default:
      return write_planes<8>(codes, row, block);
  }
}

} // namespace mlxinfer::cpu
