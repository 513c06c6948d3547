// 8x8 matrices of a simdgroup seen from a lane: it holds two neighbours of one row, and three other lanes hold the rest of the row.
#pragma once

inline uint fragment_row(uint lane) { return lane / 16 * 4 + lane / 2 % 4; }
inline uint fragment_column(uint lane) { return lane % 16 / 8 * 4 + lane % 2 * 2; }

// Over the four lanes of a row, which differ in the bits 1 and 8 of their numbers.
inline float row_maximum(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}
