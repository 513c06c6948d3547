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

constexpr uint32_t each(uint32_t byte) {
  return byte * 0x01010101u;
}

// Types with blocks of 32 columns. Four bits: byte i has those of columns i and 16 + i. A fifth bit is in a word of 32.

void nibbles(const uint8_t* from, Codes& codes) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t both = four_bytes(from + 4 * i);
    codes[i] = both & each(15);
    codes[4 + i] = both >> 4 & each(15);
  }
}

void fifth_bits(const uint8_t* from, Codes& codes) {
  const uint32_t bits = four_bytes(from);
  for (int i = 0; i < 8; ++i) {
    // The product has the four bits at 0, 7, 14 and 21, so that bit i of them is at 8 * i.
    codes[i] |= ((bits >> 4 * i & 15) * 0x00204081u & each(1)) << 4;
  }
}

void q4_0(const uint8_t* block, int, Codes& codes) {
  nibbles(block + 2, codes);
}

void q4_1(const uint8_t* block, int, Codes& codes) {
  nibbles(block + 4, codes);
}

void q5_0(const uint8_t* block, int, Codes& codes) {
  nibbles(block + 6, codes);
  fifth_bits(block + 2, codes);
}

void q5_1(const uint8_t* block, int, Codes& codes) {
  nibbles(block + 8, codes);
  fifth_bits(block + 4, codes);
}

void q8_0(const uint8_t* block, int, Codes& codes) {
  for (int i = 0; i < 8; ++i) {
    codes[i] = four_bytes(block + 2 + 4 * i) ^ each(0x80);
  }
}

// Types with blocks of 256 columns. Codes of two parts of 32 columns (four bits), or of four (two bits), share bytes.

void pairs_of_bits(const uint8_t* from, int part, Codes& codes) {
  from += part / 4 * kBlockColumns;
  for (int i = 0; i < 8; ++i) {
    codes[i] = four_bytes(from + 4 * i) >> (part % 4 * 2) & each(3);
  }
}

void fours_of_bits(const uint8_t* from, int part, Codes& codes) {
  from += part / 2 * kBlockColumns;
  for (int i = 0; i < 8; ++i) {
    codes[i] = four_bytes(from + 4 * i) >> (part % 2 * 4) & each(15);
  }
}

// One more bit above `low` others, which are in the order of the parts.
void next_bit(const uint8_t* from, int part, int low, Codes& codes) {
  for (int i = 0; i < 8; ++i) {
    codes[i] |= (four_bytes(from + 4 * i) >> part & each(1)) << low;
  }
}

void q2_k(const uint8_t* block, int part, Codes& codes) {
  pairs_of_bits(block + 16, part, codes);
}

void q2_k_counts(const uint8_t* block, int8_t* scales, int8_t* biases) {
  for (int g = 0; g < 16; ++g) {
    scales[g] = static_cast<int8_t>(block[g] & 15);
    biases[g] = static_cast<int8_t>(-(block[g] >> 4));
  }
}

void q3_k(const uint8_t* block, int part, Codes& codes) {
  pairs_of_bits(block + 32, part, codes);
  next_bit(block, part, 2, codes);
}

void q3_k_counts(const uint8_t* block, int8_t* scales, int8_t*) {
  const uint8_t* packed = block + 96;
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4, high = (packed[8 + g % 4] >> (g / 4 * 2)) & 3;
    scales[g] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

void q4_k(const uint8_t* block, int part, Codes& codes) {
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

void q5_k(const uint8_t* block, int part, Codes& codes) {
  fours_of_bits(block + 48, part, codes);
  next_bit(block + 16, part, 4, codes);
}

void q6_k(const uint8_t* block, int part, Codes& codes) {
  const uint8_t* low = block + part / 4 * 64 + part % 2 * kBlockColumns;
  const uint8_t* high = block + 128 + part / 4 * kBlockColumns;
  for (int i = 0; i < 8; ++i) {
    codes[i] = (four_bytes(low + 4 * i) >> (part % 4 / 2 * 4) & each(15)) | (four_bytes(high + 4 * i) >> (part % 4 * 2) & each(3)) << 4;
  }
}

void q6_k_counts(const uint8_t* block, int8_t* scales, int8_t*) {
  std::memcpy(scales, block + 192, 16);
}

// `Read` gives the codes of 32 columns from column 32 * `part` of a block on.
template <void (*Read)(const uint8_t* block, int part, Codes& codes), int Bits>
void planes(const uint8_t* rows, int64_t row_bytes, int part, int first, int count, uint8_t* to) {
  for (int r = 0; r < count; ++r, rows += row_bytes) {
    Codes codes;
    Read(rows, part, codes);
    write_planes<Bits>(codes, first + r, to);
  }
}

constexpr GgufType kTypes[] = {
    {"Q4_0", 32, 18, Code::affine4, Scale::f16, 32, 8, planes<q4_0, 4>, 0, -1, nullptr},
    {"Q4_1", 32, 20, Code::affine4, Scale::f16, 32, 0, planes<q4_1, 4>, 0, 2, nullptr},
    {"Q5_0", 32, 22, Code::affine5, Scale::f16, 32, 16, planes<q5_0, 5>, 0, -1, nullptr},
    {"Q5_1", 32, 24, Code::affine5, Scale::f16, 32, 0, planes<q5_1, 5>, 0, 2, nullptr},
    {"Q8_0", 32, 34, Code::affine8, Scale::f16, 32, 128, planes<q8_0, 8>, 0, -1, nullptr},
    {"Q2_K", 256, 84, Code::halves2, Scale::nested, 16, 0, planes<q2_k, 2>, 80, 82, q2_k_counts},
    {"Q3_K", 256, 110, Code::halves3, Scale::nested, 16, 4, planes<q3_k, 3>, 108, -1, q3_k_counts},
    {"Q4_K", 256, 144, Code::affine4, Scale::nested, 32, 0, planes<q4_k, 4>, 0, 2, k_counts},
    {"Q5_K", 256, 176, Code::affine5, Scale::nested, 32, 0, planes<q5_k, 5>, 0, 2, k_counts},
    {"Q6_K", 256, 210, Code::halves6, Scale::nested, 16, 32, planes<q6_k, 6>, 208, -1, q6_k_counts},
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
        type_.planes(rows, row_bytes_, part, first, count, to);
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
