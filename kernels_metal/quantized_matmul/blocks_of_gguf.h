// Pieces of GGUF's matrices, from the bytes of the file: ggml's blocks, in rows one after another.
//
// A piece is those 32 numbers of a row whose codes lie together, so that every byte of codes is loaded by one lane. They are four octets,
// each of eight neighbouring numbers; where an octet begins is `first_of`. Blocks of 256 numbers have eight pieces, those of 32 are one.
// Numbers are what ggml defines, computed in float32 in its order.
#pragma once

// ggml's numbers of the types.
constant constexpr int kQ4_0 = 2, kQ5_0 = 6, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14;

template <int TYPE>
struct BlockBytes {
  static constexpr constant int value = TYPE == kQ4_0 ? 18 : TYPE == kQ5_0 ? 22 : TYPE == kQ8_0 ? 34 : TYPE == kQ4_K ? 144 : TYPE == kQ5_K ? 176 : 210;
};

template <int TYPE>
struct BlockNumbers {
  static constexpr constant int value = TYPE >= kQ4_K ? 256 : 32;
};

template <int TYPE>
struct Blocks {
  const device uchar* bytes;  // [N, stride]
  uint stride;
};

template <int TYPE>
inline const device uchar* block_at(thread const Blocks<TYPE>& m, int row, int block) {
  return m.bytes + ulong(row) * m.stride + uint(block) * uint(BlockBytes<TYPE>::value);
}

template <int TYPE>
inline int first_of(thread const Blocks<TYPE>&, int number, int octet) {
  return 32 * number + 8 * octet;
}

inline float half_at(const device uchar* from) { return float(*(const device half*)from); }

// BYTES bytes from an even address.
template <int BYTES>
inline void load_pairs(const device uchar* from, thread uint* words) {
  const DeviceRows rows = {from, 0};
  load_run<BYTES, 2>(rows, 0, 0, words);
}

// Q4_K and Q5_K: scale and minimum of 6 bits for 32 numbers. A piece takes 16 bytes: low halves are numbers of one group of 32, high
// halves of the next. Blocks have multiples of 16 bytes.
struct PairedScales {
  float scale[2], minimum[2];
};

// The header of a block is d, dmin, and twelve bytes of scales: the low 6 bits of four scales, of four minima, and 4 bits of four more each.
inline PairedScales paired_scales(const device uchar* block, int part) {
  const uint4 header = *(const device uint4*)block;
  const int shift = part / 2 % 2 * 16;
  const uint a = header.y >> shift, b = header.z >> shift, c = header.w >> shift;
  const uint scales = part < 4 ? a & 0x3F3Fu : (c & 0x0F0Fu) | (a >> 2 & 0x3030u);
  const uint minima = part < 4 ? b & 0x3F3Fu : (c >> 4 & 0x0F0Fu) | (b >> 2 & 0x3030u);
  const float d = float(as_type<half>(ushort(header.x & 0xFFFFu))), dmin = float(as_type<half>(ushort(header.x >> 16)));
  PairedScales found;
  found.scale[0] = d * float(scales & 255u);
  found.scale[1] = d * float(scales >> 8 & 255u);
  found.minimum[0] = dmin * float(minima & 255u);
  found.minimum[1] = dmin * float(minima >> 8 & 255u);
  return found;
}

// Of Q4_K and Q5_K alike.
inline int first_of_pair(int number, int octet) {
  return number / 8 * 256 + number % 8 / 2 * 64 + octet / 2 * 32 + number % 2 * 16 + octet % 2 * 8;
}

struct Q4KPiece {
  uint words[4];
  PairedScales scales;
};

template <>
struct PieceOf<Blocks<kQ4_K>> {
  typedef Q4KPiece type;
};

inline void load_piece(thread const Blocks<kQ4_K>& m, int row, int number, thread Q4KPiece& piece) {
  const device uchar* block = block_at(m, row, number / 8);
  const int part = number % 8;
  const DeviceRows rows = {block, 0};
  load_run<16, 16>(rows, 0, uint(16 + 16 * part), piece.words);
  piece.scales = paired_scales(block, part);
}

template <>
inline int first_of(thread const Blocks<kQ4_K>&, int number, int octet) {
  return first_of_pair(number, octet);
}

inline void octet_of(thread const Q4KPiece& piece, int octet, thread float* numbers) {
  const int high = octet / 2;
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint code = piece.words[octet % 2 * 2 + i / 4] >> (i % 4 * 8 + 4 * high) & 15u;
    numbers[i] = fma(piece.scales.scale[high], number_of_code(code, 0), -piece.scales.minimum[high]);
  }
}

// The fifth bits of all groups lie in 32 bytes: bit g of byte i belongs to number i of group g.
struct Q5KPiece {
  uint words[4];
  uint fifths[4];
  PairedScales scales;
};

template <>
struct PieceOf<Blocks<kQ5_K>> {
  typedef Q5KPiece type;
};

inline void load_piece(thread const Blocks<kQ5_K>& m, int row, int number, thread Q5KPiece& piece) {
  const device uchar* block = block_at(m, row, number / 8);
  const int part = number % 8;
  const DeviceRows rows = {block, 0};
  load_run<16, 16>(rows, 0, uint(48 + 16 * part), piece.words);
  load_run<16, 16>(rows, 0, uint(16 + 16 * (part % 2)), piece.fifths);
  UNROLL for (int i = 0; i < 4; ++i) piece.fifths[i] >>= part / 2 * 2;
  piece.scales = paired_scales(block, part);
}

template <>
inline int first_of(thread const Blocks<kQ5_K>&, int number, int octet) {
  return first_of_pair(number, octet);
}

inline void octet_of(thread const Q5KPiece& piece, int octet, thread float* numbers) {
  const int high = octet / 2;
  UNROLL for (int i = 0; i < 8; ++i) {
    const int word = octet % 2 * 2 + i / 4, shift = i % 4 * 8;
    const uint code = (piece.words[word] >> (shift + 4 * high) & 15u) | (piece.fifths[word] >> (shift + high) & 1u) << 4;
    numbers[i] = fma(piece.scales.scale[high], number_of_code(code, 0), -piece.scales.minimum[high]);
  }
}

// Q6_K: for each half of a block 64 bytes of low halves and 32 of pairs of high bits; a piece takes 8 bytes of two places of the first,
// and 8 of the second. Octets are 32 numbers apart.
struct Q6KPiece {
  uint lows[4];
  uint highs[2];
  float scale[4];
};

template <>
struct PieceOf<Blocks<kQ6_K>> {
  typedef Q6KPiece type;
};

inline void load_piece(thread const Blocks<kQ6_K>& m, int row, int number, thread Q6KPiece& piece) {
  const device uchar* block = block_at(m, row, number / 8);
  const int side = number % 8 / 4, at = number % 4 * 8;
  load_pairs<8>(block + 64 * side + at, piece.lows);
  load_pairs<8>(block + 64 * side + 32 + at, piece.lows + 2);
  load_pairs<8>(block + 128 + 32 * side + at, piece.highs);
  const device char* scales = (const device char*)(block + 192 + 8 * side + at / 16);
  const float d = half_at(block + 208);
  UNROLL for (int i = 0; i < 4; ++i) piece.scale[i] = d * float(scales[2 * i]);
}

template <>
inline int first_of(thread const Blocks<kQ6_K>&, int number, int octet) {
  return number / 4 * 128 + octet * 32 + number % 4 * 8;
}

inline void octet_of(thread const Q6KPiece& piece, int octet, thread float* numbers) {
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint low = piece.lows[octet % 2 * 2 + i / 4] >> (i % 4 * 8 + octet / 2 * 4) & 15u;
    const uint high = piece.highs[i / 4] >> (i % 4 * 8 + octet * 2) & 3u;
    numbers[i] = piece.scale[octet] * number_of_code(low | high << 4, 32);
  }
}

// Q4_0 and Q5_0: byte i holds the low halves of numbers i and 16 + i. Q5_0 has a word of fifth bits before them.
template <int TYPE>
struct HalvesPiece {
  uint words[4];
  uint fifths;
  float scale;
};

template <>
struct PieceOf<Blocks<kQ4_0>> {
  typedef HalvesPiece<kQ4_0> type;
};

template <>
struct PieceOf<Blocks<kQ5_0>> {
  typedef HalvesPiece<kQ5_0> type;
};

template <int TYPE>
inline void load_piece(thread const Blocks<TYPE>& m, int row, int number, thread HalvesPiece<TYPE>& piece) {
  const device uchar* block = block_at(m, row, number);
  piece.scale = half_at(block);
  piece.fifths = 0;
  if (TYPE == kQ5_0) load_pairs<4>(block + 2, &piece.fifths);
  load_pairs<16>(block + (TYPE == kQ5_0 ? 6 : 2), piece.words);
}

template <int TYPE>
inline void octet_of(thread const HalvesPiece<TYPE>& piece, int octet, thread float* numbers) {
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint low = piece.words[octet % 2 * 2 + i / 4] >> (i % 4 * 8 + octet / 2 * 4) & 15u;
    const uint fifth = piece.fifths >> (8 * octet + i) & 1u;
    numbers[i] = piece.scale * number_of_code(low | fifth << 4, TYPE == kQ5_0 ? 16 : 8);
  }
}

// Q8_0: 32 signed bytes.
struct Q80Piece {
  uint words[8];
  float scale;
};

template <>
struct PieceOf<Blocks<kQ8_0>> {
  typedef Q80Piece type;
};

inline void load_piece(thread const Blocks<kQ8_0>& m, int row, int number, thread Q80Piece& piece) {
  const device uchar* block = block_at(m, row, number);
  piece.scale = half_at(block);
  load_pairs<32>(block + 2, piece.words);
}

inline void octet_of(thread const Q80Piece& piece, int octet, thread float* numbers) {
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint byte = piece.words[2 * octet + i / 4] >> (i % 4 * 8) & 255u;
    numbers[i] = piece.scale * number_of_code(byte ^ 128u, 128);
  }
}
