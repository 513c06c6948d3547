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

// Four codes each, a byte for each, of a row's 32 columns in a block.
using Codes = uint32_t[8];

// The plane of `Plane` bits of one row's codes, behind those of more bits, which hold the codes' lower ones; see layout.h and unpack.h.
template <int Bits, int Plane>
inline void write_plane(const Codes& codes, int row, uint8_t* block) {
  if constexpr ((Bits & Plane) != 0) {
    constexpr int kLow = Bits & ~(2 * Plane - 1), kPerLane = 8 / Plane;
    constexpr uint32_t kMask = 0x01010101u * ((1u << Plane) - 1);
    for (int i = 0; i < Plane; ++i) {
      uint32_t lanes = 0;
      for (int j = 0; j < kPerLane; ++j) {
        lanes |= (codes[i * kPerLane + j] >> kLow & kMask) << (j * Plane);
      }
      put_lane(block, kLow + i, row, lanes);
    }
  }
}

template <int Bits>
inline void write_planes(const Codes& codes, int row, uint8_t* block) {
  write_plane<Bits, 8>(codes, row, block);
  write_plane<Bits, 4>(codes, row, block);
  write_plane<Bits, 2>(codes, row, block);
  write_plane<Bits, 1>(codes, row, block);
}

inline void write_planes(const Codes& codes, int bits, int row, uint8_t* block) {
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
