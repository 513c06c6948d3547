// Rows of x times 16 rows of a quantized matrix.
//
// A threadgroup computes [ROWS, 16] of the result; its simdgroups divide K among themselves, 256 numbers at a time, and add up at the end.
// A lane has the place of the 8x8 matrices (fragments.h) in every variant: it takes piece `fragment_row` of eight, of four rows of the
// matrix, and takes it apart in registers, once for all rows of x. Which numbers of K are multiplied with one another first does not
// matter, so the rows of an 8x8 matrix of weights are not neighbours in K but the eight pieces: that lets lanes load whole pieces.
//
// A gated product has the gates in the first half of the matrix, and what they are multiplied with in the second: a threadgroup takes eight
// rows of each, so that it has both sums of a result.
#pragma once
#include "quantized_matmul/lanes.h"

constant constexpr int kColumns = 16;  // rows of the quantized matrix, which are columns of the result
constant constexpr int kOfLane = 4;    // of which a lane takes four: two neighbours in each half
constant constexpr int kMostSimdgroups = 8;

// What a threadgroup computes.
struct Tile {
  int row, rows;       // of x: the first, and how many there are from it on, at least one
  int column, columns;  // of the result: the first, and how many there are in all
  int pieces;          // of a row
  bool gated;
  uint simdgroup, simdgroups, lane;
};

// Row of the matrix for column `index` of four, or the last one there is: what is computed for it is not stored.
inline int column_of_lane(Tile tile, int index) {
  const int own = tile.column + int(fragment_column(tile.lane)) + index % 2, side = index / 2;
  return tile.gated ? min(own, tile.columns - 1) + side * tile.columns : min(own + side * 8, tile.columns - 1);
}

// Up to four rows of x: products lane by lane. `sums` are [ROWS, 4].
template <typename T, typename M, int ROWS>
inline void multiply_lanes(const device T* x, thread const M& packed, Tile tile, thread float* sums) {
  const int k = 32 * tile.pieces;
  ROLLED for (int block = int(tile.simdgroup); 8 * block < tile.pieces; block += int(tile.simdgroups)) {
    const int wanted = 8 * block + int(fragment_row(tile.lane)), number = min(wanted, tile.pieces - 1);
    typename PieceOf<M>::type pieces[kOfLane];
    UNROLL for (int c = 0; c < kOfLane; ++c) load_piece(packed, column_of_lane(tile, c), number, pieces[c]);
    UNROLL for (int octet = 0; octet < 4; ++octet) {
      float weights[8 * kOfLane];
      UNROLL for (int c = 0; c < kOfLane; ++c) octet_of(pieces[c], octet, weights + 8 * c);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        float numbers[8];
        const device T* from = x + ulong(tile.row + min(r, tile.rows - 1)) * ulong(k) + first_of(packed, number, octet);
        octet_of_x(from, wanted == number, numbers);
        UNROLL for (int c = 0; c < kOfLane; ++c) {
          UNROLL for (int i = 0; i < 8; ++i) sums[r * kOfLane + c] = fma(weights[8 * c + i], numbers[i], sums[r * kOfLane + c]);
        }
      }
    }
  }
}

template <int ROWS>
inline void share_lanes(thread const float* sums, Tile tile, threadgroup float* partial) {
  UNROLL for (int i = 0; i < ROWS * kOfLane; ++i) {
    const float sum = sum_of_pieces(sums[i]);
    const int column = i % kOfLane / 2 * 8 + int(fragment_column(tile.lane)) + i % 2;
    if (fragment_row(tile.lane) == 0) partial[i / kOfLane * kColumns + column] = sum;
  }
}

// 8 or 16 rows of x: products of 8x8 matrices in float32. `sums` are [BLOCKS, 2] matrices of 8 rows and 8 columns.
template <typename T, typename M, int BLOCKS>
inline void multiply_matrices(const device T* x, thread const M& packed, Tile tile, thread simdgroup_matrix<float, 8, 8>* sums) {
  const int k = 32 * tile.pieces;
  ROLLED for (int block = int(tile.simdgroup); 8 * block < tile.pieces; block += int(tile.simdgroups)) {
    typename PieceOf<M>::type pieces[kOfLane];
    const int own = min(8 * block + int(fragment_row(tile.lane)), tile.pieces - 1);
    UNROLL for (int c = 0; c < kOfLane; ++c) load_piece(packed, column_of_lane(tile, c), own, pieces[c]);
    UNROLL for (int octet = 0; octet < 4; ++octet) {
      float numbers[BLOCKS * 16];
      UNROLL for (int i = 0; i < 2 * BLOCKS; ++i) {
        const int wanted = 8 * block + int(fragment_column(tile.lane)) + i % 2, number = min(wanted, tile.pieces - 1);
        const int row = i / 2 * 8 + int(fragment_row(tile.lane));
        const device T* from = x + ulong(tile.row + min(row, tile.rows - 1)) * ulong(k) + first_of(packed, number, octet);
        octet_of_x(from, wanted == number && row < tile.rows, numbers + 8 * i);
      }
      UNROLL for (int side = 0; side < 2; ++side) {
        float weights[16];
        octet_of(pieces[2 * side], octet, weights);
        octet_of(pieces[2 * side + 1], octet, weights + 8);
        UNROLL for (int i = 0; i < 8; ++i) {
          simdgroup_matrix<float, 8, 8> right;
          right.thread_elements()[0] = weights[i];
          right.thread_elements()[1] = weights[8 + i];
          UNROLL for (int b = 0; b < BLOCKS; ++b) {
            simdgroup_matrix<float, 8, 8> left;
            left.thread_elements()[0] = numbers[16 * b + i];
            left.thread_elements()[1] = numbers[16 * b + 8 + i];
            simdgroup_multiply_accumulate(sums[2 * b + side], left, right, sums[2 * b + side]);
          }
        }
      }
    }
  }
}

template <int BLOCKS>
inline void share_matrices(thread simdgroup_matrix<float, 8, 8>* sums, Tile tile, threadgroup float* partial) {
  threadgroup float* to = partial + int(fragment_row(tile.lane)) * kColumns + int(fragment_column(tile.lane));
  UNROLL for (int i = 0; i < 2 * BLOCKS; ++i) {
    to[i / 2 * 8 * kColumns + i % 2 * 8] = sums[i].thread_elements()[0];
    to[i / 2 * 8 * kColumns + i % 2 * 8 + 1] = sums[i].thread_elements()[1];
  }
}

// Which of the two ways a number of rows takes.
template <int ROWS>
struct ByLanes {};
template <int ROWS>
struct ByMatrices {};

template <int ROWS>
struct WayOf {
  typedef ByLanes<ROWS> type;
};
template <>
struct WayOf<8> {
  typedef ByMatrices<8> type;
};
template <>
struct WayOf<16> {
  typedef ByMatrices<16> type;
};

// Leaves the simdgroup's part of the result, [ROWS, 16], in `partial`.
template <typename T, typename M, int ROWS>
inline void multiply(ByLanes<ROWS>, const device T* x, thread const M& packed, Tile tile, threadgroup float* partial) {
  float sums[ROWS * kOfLane];
  UNROLL for (int i = 0; i < ROWS * kOfLane; ++i) sums[i] = 0.0f;
  multiply_lanes<T, M, ROWS>(x, packed, tile, sums);
  share_lanes<ROWS>(sums, tile, partial);
}

template <typename T, typename M, int ROWS>
inline void multiply(ByMatrices<ROWS>, const device T* x, thread const M& packed, Tile tile, threadgroup float* partial) {
  simdgroup_matrix<float, 8, 8> sums[ROWS / 4];
  UNROLL for (int i = 0; i < ROWS / 4; ++i) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  multiply_matrices<T, M, ROWS / 8>(x, packed, tile, sums);
  share_matrices<ROWS / 8>(sums, tile, partial);
}

// Adds up what the simdgroups have left of a number, always in the same order.
template <int ROWS>
inline float sum_of_parts(const threadgroup float* partial, Tile tile, int i) {
  float sum = 0.0f;
  for (uint part = 0; part < tile.simdgroups; ++part) sum += partial[int(part) * ROWS * kColumns + i];
  return sum;
}

template <typename T, int ROWS, int GATE>
inline void store(const threadgroup float* partial, Tile tile, device T* out) {
  constexpr int columns = GATE == 0 ? kColumns : kColumns / 2;
  for (int i = int(32 * tile.simdgroup + tile.lane); i < ROWS * columns; i += int(32 * tile.simdgroups)) {
    const int row = i / columns, column = tile.column + i % columns, at = row * kColumns + i % columns;
    if (row >= tile.rows || column >= tile.columns) continue;
    float number = sum_of_parts<ROWS>(partial, tile, at);
    if (GATE != 0) number = activated<GATE>(number) * sum_of_parts<ROWS>(partial, tile, at + columns);
    out[ulong(tile.row + row) * ulong(tile.columns) + ulong(column)] = T(number);
  }
}
