// x [1, K] times a quantized matrix [N, K], transposed: every byte of the matrix is read once.
//
// With a GATE, the result is activation(first half of the columns) * second half: `activated` in lanes.h has them.
// README.md has the design, one_row.h the arithmetic, codes_of_mlx.h the formats.
#include "include/codes.h"

// The registers of a lane that hold 32 numbers of a row, for each kind of matrix.
template <typename M>
struct PieceOf;

#include "quantized_matmul/codes_of_mlx.h"
#include "quantized_matmul/lanes.h"
#include "quantized_matmul/one_row.h"

//: kernel affine_vector(x, weight, scales, biases) -> out
//: threads (32 * shares * threadgroups, blocks, 1), groups of (32 * shares, blocks, 1): `shares` simdgroups divide K, `blocks` of them have
//: four rows each, at most 8 simdgroups
threadgroup float partial[kMostParts * kRows];
const int shares = int(threads_per_threadgroup.x) / 32, blocks = int(threads_per_threadgroup.y);
const int share = int(simdgroup_index_in_threadgroup) % shares, block = int(simdgroup_index_in_threadgroup) / shares;
constexpr int kSides = GATE == 0 ? 1 : 2;
const int row = (int(threadgroup_position_in_grid.x) * blocks + block) * (kRows / kSides), rows = weight_shape[0] / kSides;
const int runs = row < rows ? x_shape[1] / Run<BITS>::numbers : 0;
const Part part = {row, rows, GATE != 0, 32 * share + int(thread_index_in_simdgroup), 32 * shares, runs};
const AffineCodes<T, BITS, GROUP> packed = {(const device uchar*)weight, scales, biases, x_shape[1]};
multiply_rows(packed, x, part, thread_index_in_simdgroup, partial + simdgroup_index_in_threadgroup * kRows);
threadgroup_barrier(mem_flags::mem_threadgroup);
if (share == 0) store_rows<T, GATE>(partial + block * shares * kRows, part, shares, thread_index_in_simdgroup, out);

//: kernel mxfp4_vector(x, weight, scales) -> out
//: threads as for affine_vector
threadgroup float partial[kMostParts * kRows];
const int shares = int(threads_per_threadgroup.x) / 32, blocks = int(threads_per_threadgroup.y);
const int share = int(simdgroup_index_in_threadgroup) % shares, block = int(simdgroup_index_in_threadgroup) / shares;
constexpr int kSides = GATE == 0 ? 1 : 2;
const int row = (int(threadgroup_position_in_grid.x) * blocks + block) * (kRows / kSides), rows = weight_shape[0] / kSides;
const Part part = {row, rows, GATE != 0, 32 * share + int(thread_index_in_simdgroup), 32 * shares, row < rows ? x_shape[1] / 32 : 0};
const Mxfp4Codes packed = {(const device uchar*)weight, scales, x_shape[1]};
multiply_rows(packed, x, part, thread_index_in_simdgroup, partial + simdgroup_index_in_threadgroup * kRows);
threadgroup_barrier(mem_flags::mem_threadgroup);
if (share == 0) store_rows<T, GATE>(partial + block * shares * kRows, part, shares, thread_index_in_simdgroup, out);
