// Pieces of MLX's own quantized matrices: affine codes of 2 to 8 bits, and mxfp4.
//
// A piece is 32 neighbouring numbers of a row: as many words as a code has bits, and one scale, as groups have 32 numbers or more.
#pragma once

template <typename S, int BITS, int GROUP>
struct AffineCodes {
  const device uchar* codes;  // [N, K * BITS / 8], rows of whole words
  const device S* scales;     // [N, K / GROUP]
  const device S* biases;
  int columns;                // K
};

template <int BITS>
struct AffinePiece {
  uint words[BITS];
  float scale, bias;
};

template <typename S, int BITS, int GROUP>
struct PieceOf<AffineCodes<S, BITS, GROUP>> {
  typedef AffinePiece<BITS> type;
};

template <typename S, int BITS, int GROUP>
inline void load_piece(thread const AffineCodes<S, BITS, GROUP>& m, int row, int number, thread AffinePiece<BITS>& piece) {
  const DeviceRows rows = {m.codes, uint(m.columns / 8 * BITS)};
  load_run<4 * BITS, LoadWidth<4 * BITS, 4 * BITS>::value>(rows, uint(row), uint(4 * BITS * number), piece.words);
  const int group = row * (m.columns / GROUP) + number / (GROUP / 32);
  piece.scale = float(m.scales[group]);
  piece.bias = float(m.biases[group]);
}

template <typename S, int BITS, int GROUP>
inline int first_of(thread const AffineCodes<S, BITS, GROUP>&, int number, int octet) {
  return 32 * number + 8 * octet;
}

template <int BITS>
inline void octet_of(thread const AffinePiece<BITS>& piece, int octet, thread float* numbers) {
  UNROLL for (int i = 0; i < 8; ++i) numbers[i] = fma(piece.scale, value_at<half, BITS>(piece.words, 8 * octet + i), piece.bias);
}

// Numbers of four bits, and a power of two for 32 of them.
struct Mxfp4Codes {
  const device uchar* codes;   // [N, K / 2]
  const device uchar* scales;  // [N, K / 32]
  int columns;
};

struct Mxfp4Piece {
  uint words[4];
  float scale;
};

template <>
struct PieceOf<Mxfp4Codes> {
  typedef Mxfp4Piece type;
};

inline void load_piece(thread const Mxfp4Codes& m, int row, int number, thread Mxfp4Piece& piece) {
  const DeviceRows rows = {m.codes, uint(m.columns / 2)};
  load_run<16, 16>(rows, uint(row), uint(16 * number), piece.words);
  const uint power = m.scales[row * (m.columns / 32) + number];
  piece.scale = as_type<float>(power == 0 ? 0x400000u : power << 23);  // 2^(power - 127)
}

inline int first_of(thread const Mxfp4Codes&, int number, int octet) { return 32 * number + 8 * octet; }

inline void octet_of(thread const Mxfp4Piece& piece, int octet, thread float* numbers) {
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint code = bits_at<half, 4>(piece.words, 8 * octet + i);
    const uint doubled = 0xC8643210u >> (4 * (code & 7u)) & 15u;  // of 0, 1/2, 1, 3/2, 2, 3, 4, 6
    const float size = number_of_code(doubled, 0) * (0.5f * piece.scale);
    numbers[i] = code < 8u ? size : -size;
  }
}
