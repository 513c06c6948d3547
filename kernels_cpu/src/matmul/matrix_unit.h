#pragma once

#include <stdint.h>

// What *.kernels.cpp files for matrix units (AMX) have in common.
#define MLXINFER_AMX [[gnu::target("amx-tile,amx-int8")]]

namespace mlxinfer::cpu::MLXINFER_ISA {

struct alignas(64) TileConfiguration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

} // namespace mlxinfer::cpu::MLXINFER_ISA
