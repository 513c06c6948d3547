// x [rows, K] times a quantized matrix [N, K], transposed, for a few rows: every byte of the matrix is read once per ROWS rows of x.
//
// With a GATE, the result is activation(first half of the columns) * second half: `activated` in lanes.h has them.
// README.md has the tile and the bytes, tile.h the arithmetic, codes_of_mlx.h the formats.
#include "include/codes.h"
#include "include/fragments.h"

// The registers of a lane that hold 32 numbers of a row, for each kind of matrix.
template <typename M>
struct PieceOf;

#include "quantized_matmul/codes_of_mlx.h"
#include "quantized_matmul/tile.h"

//: kernel affine_matmul(x, weight, scales, biases) -> out
//: threads (32 * simdgroups * tiles of 16 columns of the matrix, tiles of ROWS rows, 1), groups of (32 * simdgroups, 1, 1), at most 8 simdgroups
threadgroup float partial[kMostSimdgroups * ROWS * kColumns];
constexpr int kSides = GATE == 0 ? 1 : 2;
const int first_row = int(threadgroup_position_in_grid.y) * ROWS;
const Tile tile = {first_row, x_shape[0] - first_row, int(threadgroup_position_in_grid.x) * (kColumns / kSides),
                   weight_shape[0] / kSides, x_shape[1] / 32, GATE != 0, simdgroup_index_in_threadgroup,
                   simdgroups_per_threadgroup, thread_index_in_simdgroup};
const AffineCodes<T, BITS, GROUP> packed = {(const device uchar*)weight, scales, biases, x_shape[1]};
multiply<T, AffineCodes<T, BITS, GROUP>, ROWS>(typename WayOf<ROWS>::type(), x, packed, tile, partial + tile.simdgroup * (ROWS * kColumns));
threadgroup_barrier(mem_flags::mem_threadgroup);
store<T, ROWS, GATE>(partial, tile, out);

//: kernel mxfp4_matmul(x, weight, scales) -> out
//: threads as for affine_matmul
threadgroup float partial[kMostSimdgroups * ROWS * kColumns];
constexpr int kSides = GATE == 0 ? 1 : 2;
const int first_row = int(threadgroup_position_in_grid.y) * ROWS;
const Tile tile = {first_row, x_shape[0] - first_row, int(threadgroup_position_in_grid.x) * (kColumns / kSides),
                   weight_shape[0] / kSides, x_shape[1] / 32, GATE != 0, simdgroup_index_in_threadgroup,
                   simdgroups_per_threadgroup, thread_index_in_simdgroup};
const Mxfp4Codes packed = {(const device uchar*)weight, scales, x_shape[1]};
multiply<T, Mxfp4Codes, ROWS>(typename WayOf<ROWS>::type(), x, packed, tile, partial + tile.simdgroup * (ROWS * kColumns));
threadgroup_barrier(mem_flags::mem_threadgroup);
store<T, ROWS, GATE>(partial, tile, out);
