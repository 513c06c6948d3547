#include "matmul/gguf.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "matmul/planes.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int kHalf = kBlockColumns / 2;
constexpr size_t kRowsPerPiece = 4 * kPanelRows;

// Types with blocks of 32 columns. Four bits: byte i has those of columns i and 16 + i. A fifth bit is in a word of 32.

void nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < kHalf; ++i) {
    codes[i] = from[i] & 15;
    codes[kHalf + i] = from[i] >> 4;
  }
}

void fifth_bits(const uint8_t* from, uint8_t* codes) {
  const uint32_t bits = four_bytes(from);
  for (int i = 0; i < kBlockColumns; ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] | ((bits >> i) & 1u) << 4);
  }
}

void q4_0(const uint8_t* block, int, uint8_t* codes) {
  nibbles(block + 2, codes);
}

void q4_1(const uint8_t* block, int, uint8_t* codes) {
  nibbles(block + 4, codes);
}

void q5_0(const uint8_t* block, int, uint8_t* codes) {
  nibbles(block + 6, codes);
  fifth_bits(block + 2, codes);
}

void q5_1(const uint8_t* block, int, uint8_t* codes) {
  nibbles(block + 8, codes);
  fifth_bits(block + 4, codes);
}

void q8_0(const uint8_t* block, int, uint8_t* codes) {
  for (int i = 0; i < kBlockColumns; ++i) {
    codes[i] = block[2 + i] ^ 0x80;
  }
}

// Types with blocks of 256 columns. Codes of two parts of 32 columns (four bits), or of four (two bits), share bytes.

void pairs_of_bits(const uint8_t* from, int part, uint8_t* codes) {
  from += part / 4 * kBlockColumns;
  for (int i = 0; i < kBlockColumns; ++i) {
    codes[i] = (from[i] >> (part % 4 * 2)) & 3;
  }
}

void fours_of_bits(const uint8_t* from, int part, uint8_t* codes) {
  from += part / 2 * kBlockColumns;
  for (int i = 0; i < kBlockColumns; ++i) {
    codes[i] = (from[i] >> (part % 2 * 4)) & 15;
  }
}

void q2_k(const uint8_t* block, int part, uint8_t* codes) {
  pairs_of_bits(block + 16, part, codes);
}

void q2_k_counts(const uint8_t* block, int8_t* scales, int8_t* biases) {
  for (int g = 0; g < 16; ++g) {
    scales[g] = static_cast<int8_t>(block[g] & 15);
    biases[g] = static_cast<int8_t>(-(block[g] >> 4));
  }
}

void q3_k(const uint8_t* block, int part, uint8_t* codes) {
  pairs_of_bits(block + 32, part, codes);
  for (int i = 0; i < kBlockColumns; ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] | ((block[i] >> part) & 1) << 2);
  }
}

void q3_k_counts(const uint8_t* block, int8_t* scales, int8_t*) {
  const uint8_t* packed = block + 96;
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4, high = (packed[8 + g % 4] >> (g / 4 * 2)) & 3;
    scales[g] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

void q4_k(const uint8_t* block, int part, uint8_t* codes) {
  fours_of_bits(block + 16, part, codes);
}

// Six bits each in twelve bytes, for Q4_K and Q5_K.
void k_counts(const uint8_t* block, int8_t* scales, int8_t* biases) {
  const uint8_t* packed = block + 4;
  for (int g = 0; g < 4; ++g) {
    scales[g] = static_cast<int8_t>(packed[g] & 63);
    biases[g] = static_cast<int8_t>(-(packed[4 + g] & 63));
    scales[4 + g] = static_cast<int8_t>((packed[8 + g] & 15) | (packed[g] >> 6) << 4);
    biases[4 + g] = static_cast<int8_t>(-((packed[8 + g] >> 4) | (packed[4 + g] >> 6) << 4));
  }
}

void q5_k(const uint8_t* block, int part, uint8_t* codes) {
  fours_of_bits(block + 48, part, codes);
  for (int i = 0; i < kBlockColumns; ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] | ((block[16 + i] >> part) & 1) << 4);
  }
}

void q6_k(const uint8_t* block, int part, uint8_t* codes) {
  const uint8_t* low = block + part / 4 * 64 + part % 2 * kBlockColumns;
  const uint8_t* high = block + 128 + part / 4 * kBlockColumns;
  for (int i = 0; i < kBlockColumns; ++i) {
    codes[i] = static_cast<uint8_t>(((low[i] >> (part % 4 / 2 * 4)) & 15) | ((high[i] >> (part % 4 * 2)) & 3) << 4);
  }
}

void q6_k_counts(const uint8_t* block, int8_t* scales, int8_t*) {
  std::memcpy(scales, block + 192, 16);
}

constexpr GgufType kTypes[] = {
    {"Q4_0", 32, 18, Code::affine4, Scale::f16, 32, 8, q4_0, 0, -1, nullptr},
    {"Q4_1", 32, 20, Code::affine4, Scale::f16, 32, 0, q4_1, 0, 2, nullptr},
    {"Q5_0", 32, 22, Code::affine5, Scale::f16, 32, 16, q5_0, 0, -1, nullptr},
    {"Q5_1", 32, 24, Code::affine5, Scale::f16, 32, 0, q5_1, 0, 2, nullptr},
    {"Q8_0", 32, 34, Code::affine8, Scale::f16, 32, 128, q8_0, 0, -1, nullptr},
    {"Q2_K", 256, 84, Code::halves2, Scale::nested, 16, 0, q2_k, 80, 82, q2_k_counts},
    {"Q3_K", 256, 110, Code::halves3, Scale::nested, 16, 4, q3_k, 108, -1, q3_k_counts},
    {"Q4_K", 256, 144, Code::affine4, Scale::nested, 32, 0, q4_k, 0, 2, k_counts},
    {"Q5_K", 256, 176, Code::affine5, Scale::nested, 32, 0, q5_k, 0, 2, k_counts},
    {"Q6_K", 256, 210, Code::halves6, Scale::nested, 16, 32, q6_k, 208, -1, q6_k_counts},
};

// Copies a float16; false where it is infinite or NaN.
bool put_half(const uint8_t* from, uint8_t* to, int row) {
  std::memcpy(to + 2 * row, from, 2);
  return (from[1] & 0x7c) != 0x7c;
}

class PanelWriter {
 public:
  PanelWriter(const GgufType& type, const Layout& l)
      : type_(type), l_(l), row_bytes_(l.k / type.columns * type.bytes), block_bytes_(l.block_bytes()), group_bytes_(l.group_header_bytes()),
        scales_bytes_(l.scales_bytes()), nest_bytes_(l.nest_header_bytes()) {}

  // Neighbouring rows of one panel, block by block, so that what is written lies together. False where a scale is not finite.
  bool write(const uint8_t* rows, int first, int count, uint8_t* panel) const {
    const int groups = type_.columns / l_.group;
    uint8_t *header = panel, *to = panel + l_.header_bytes();
    bool finite = true;
    for (int64_t b = 0; b < l_.k / type_.columns; ++b, rows += type_.bytes) {
      for (int r = 0; r < count; ++r) {
        finite &= write_scales(rows + r * row_bytes_, groups, first + r, header);
      }
      header += nest_bytes_ + groups * group_bytes_;
      for (int part = 0; part < type_.columns / kBlockColumns; ++part, to += block_bytes_) {
        for (int r = 0; r < count; ++r) {
          uint8_t codes[kBlockColumns];
          type_.codes(rows + r * row_bytes_, part, codes);
          write_planes(codes, l_.bits(), first + r, to);
        }
      }
    }
    return finite;
  }

 private:
  bool write_scales(const uint8_t* block, int groups, int row, uint8_t* header) const {
    bool finite = put_half(block + type_.scale_at, header, row);
    if (type_.bias_at >= 0) {
      finite &= put_half(block + type_.bias_at, header + 2 * kPanelRows, row);
    }
    if (type_.counts != nullptr) {
      int8_t scales[kNestColumns / kHalf], biases[kNestColumns / kHalf];
      type_.counts(block, scales, biases);
      uint8_t* to = header + nest_bytes_ + row;
      for (int g = 0; g < groups; ++g, to += group_bytes_) {
        std::memcpy(to, scales + g, 1);
        if (type_.bias_at >= 0) {
          std::memcpy(to + scales_bytes_, biases + g, 1);
        }
      }
    }
    return finite;
  }

  const GgufType& type_;
  const Layout& l_;
  const int64_t row_bytes_, block_bytes_, group_bytes_, scales_bytes_, nest_bytes_;
};

} // namespace

std::span<const GgufType> gguf_types() {
  return kTypes;
}

const GgufType* find_gguf_type(std::string_view name) {
  const auto* end = std::end(kTypes);
  const auto* found = std::find_if(std::begin(kTypes), end, [name](const GgufType& type) { return type.name == name; });
  return found == end ? nullptr : found;
}

bool pack_gguf(const GgufType& type, const Layout& l, int64_t first, int64_t count, const uint8_t* rows, uint8_t* out) {
  std::atomic<bool> finite{true};
  const int64_t row_bytes = l.k / type.columns * type.bytes;
  const PanelWriter writer(type, l);
  parallel_for(static_cast<size_t>(count), kRowsPerPiece, [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end);) {
      const int64_t matrix = (first + i) / l.n, row = (first + i) % l.n, lane = row % kPanelRows;
      const int64_t here = std::min({kPanelRows - lane, l.n - row, static_cast<int64_t>(end) - i});
      uint8_t* panel = out + (matrix * l.panels() + row / kPanelRows) * l.panel_bytes();
      if (!writer.write(rows + i * row_bytes, static_cast<int>(lane), static_cast<int>(here), panel)) {
        finite.store(false, std::memory_order_relaxed);
      }
      i += here;
    }
  });
  return finite.load();
}

} // namespace mlxinfer::cpu
