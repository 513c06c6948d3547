#include "matmul/pack.h"

#include <atomic>
#include <bit>
#include <cstring>

#include "matmul/convert.h"
#include "matmul/planes.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr size_t kScanPiece = 65536;

// Codes of one row's block: 32 codes of `bits` bits, lowest bits first, to one byte each.
void read_codes(const uint8_t* from, int bits, uint8_t* codes) {
  uint64_t window = 0;
  int held = 0;
  const auto mask = static_cast<uint8_t>((1 << bits) - 1);
  for (int i = 0; i < kBlockColumns; ++i) {
    if (held < bits) {
      window |= static_cast<uint64_t>(*from++) << held;
      held += 8;
    }
    codes[i] = static_cast<uint8_t>(window) & mask;
    window >>= bits;
    held -= bits;
  }
}

// Eight 4-bit codes in the order of columns to the order of a plane: byte b has columns b and 4 + b.
uint32_t spread(uint32_t half) {
  half = (half | half << 8) & 0x00ff00ffu;
  return (half | half << 4) & 0x0f0f0f0fu;
}

void write_codes(const uint8_t* from, int bits, int row, uint8_t* block) {
  if (bits == 4) {
    for (int i = 0; i < 4; ++i) {
      uint32_t word = four_bytes(from + 4 * i);
      put_lane(block, i, row, spread(word & 0xffffu) | spread(word >> 16) << 4);
    }
  } else {
    uint8_t bytes[kBlockColumns];
    if (bits != 8) {
      read_codes(from, bits, bytes);
    }
    Codes codes;
    std::memcpy(codes, bits == 8 ? from : bytes, sizeof(codes));
    write_planes(codes, bits, row, block);
  }
}

void write_scale(const void* from, Scale source, int64_t at, Scale wanted, uint8_t* header, int row) {
  if (source == wanted) {
    const int64_t bytes = source == Scale::f32 ? 4 : source <= Scale::f16 ? 2 : 1;
    std::memcpy(header + row * bytes, static_cast<const uint8_t*>(from) + at * bytes, static_cast<size_t>(bytes));
    return;
  }
  float value = source == Scale::f32 ? static_cast<const float*>(from)[at] : bfloat_to_float(static_cast<const uint16_t*>(from)[at]);
  uint16_t bits = wanted == Scale::f16 ? float_to_half(value) : float_to_bfloat(value);
  std::memcpy(header + row * 2, &bits, 2);
}

void pack_codes(const Layout& l, Scale source_scale, int64_t first_row, int rows, const Source& s, uint8_t* panel) {
  const int64_t row_bytes = l.k * l.bits() / 8;
  for (int r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < l.groups(); ++g) {
      const int64_t at = (first_row + r) * l.groups() + g;
      uint8_t* header = panel + l.group_header_offset(g);
      write_scale(s.scales, source_scale, at, l.scale, header, r);
      if (l.is_affine()) {
        write_scale(s.biases, source_scale, at, l.scale, header + l.scales_bytes(), r);
      }
    }
    const auto* row = static_cast<const uint8_t*>(s.weight) + (first_row + r) * row_bytes;
    for (int64_t b = 0; b < l.blocks(); ++b) {
      write_codes(row + b * kBlockColumns * l.bits() / 8, l.bits(), r, panel + l.header_bytes() + b * l.block_bytes());
    }
  }
}

void pack_floats(const Layout& l, int64_t first_row, int rows, const Source& s, uint8_t* panel) {
  const size_t size = static_cast<size_t>(l.bits()) / 8;
  for (int r = 0; r < rows; ++r) {
    const auto* row = static_cast<const uint8_t*>(s.weight) + (first_row + r) * l.k * static_cast<int64_t>(size);
    for (int64_t c = 0; c < l.k; ++c) {
      std::memcpy(panel + (c * kPanelRows + r) * static_cast<int64_t>(size), row + c * static_cast<int64_t>(size), size);
    }
  }
}

template <typename Check>
bool all(size_t count, Check check) {
  std::atomic<bool> holds{true};
  parallel_for(count, kScanPiece, [&](size_t begin, size_t end) {
    bool here = holds.load(std::memory_order_relaxed);
    for (size_t i = begin; here && i < end; ++i) {
      here = check(i);
    }
    if (!here) {
      holds.store(false, std::memory_order_relaxed);
    }
  });
  return holds.load();
}

} // namespace

void pack(const Layout& l, Scale source_scale, int64_t count, const Source& source, uint8_t* out) {
  parallel_for(static_cast<size_t>(count * l.panels()), 8, [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      const int64_t matrix = i / l.panels(), row = i % l.panels() * kPanelRows;
      const int rows = static_cast<int>(l.n - row < kPanelRows ? l.n - row : kPanelRows);
      uint8_t* panel = out + i * l.panel_bytes();
      std::memset(panel, 0, static_cast<size_t>(rows == kPanelRows && !l.is_plain() ? l.header_bytes() : l.panel_bytes()));
      if (l.is_plain()) {
        pack_floats(l, matrix * l.n + row, rows, source, panel);
      } else {
        pack_codes(l, source_scale, matrix * l.n + row, rows, source, panel);
      }
    }
  });
}

bool fits(const float* values, size_t count, Scale narrower) {
  return all(count, [=](size_t i) {
    float back = narrower == Scale::f16 ? half_to_float(float_to_half(values[i])) : bfloat_to_float(float_to_bfloat(values[i]));
    return std::bit_cast<uint32_t>(back) == std::bit_cast<uint32_t>(values[i]);
  });
}

bool bfloats_fit_half(const uint16_t* values, size_t count) {
  return all(count, [=](size_t i) {
    float value = bfloat_to_float(values[i]);
    return std::bit_cast<uint32_t>(half_to_float(float_to_half(value))) == std::bit_cast<uint32_t>(value);
  });
}

} // namespace mlxinfer::cpu
