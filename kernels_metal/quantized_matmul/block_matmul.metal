// The same for GGUF's blocks, and their numbers for products of many rows. blocks_of_gguf.h has the formats.
#include "include/codes.h"
#include "include/fragments.h"

// The registers of a lane that hold 32 numbers of a row, for each kind of matrix.
template <typename M>
struct PieceOf;

#include "quantized_matmul/blocks_of_gguf.h"
#include "quantized_matmul/tile.h"

//: kernel block_matmul(x, weight) -> out
//: threads as for affine_matmul
threadgroup float partial[kMostSimdgroups * ROWS * kColumns];
const int first_row = int(threadgroup_position_in_grid.y) * ROWS;
const Tile tile = {first_row, x_shape[0] - first_row, int(threadgroup_position_in_grid.x) * kColumns, weight_shape[0], x_shape[1] / 32, false,
                   simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_index_in_simdgroup};
const Blocks<TYPE> packed = {weight, uint(weight_shape[1])};
multiply<T, Blocks<TYPE>, ROWS>(typename WayOf<ROWS>::type(), x, packed, tile, partial + tile.simdgroup * (ROWS * kColumns));
threadgroup_barrier(mem_flags::mem_threadgroup);
store<T, ROWS, 0>(partial, tile, out);

//: kernel block_dequantize(weight) -> out
//: threads (pieces of all rows, rounded up to groups; 1, 1), groups of (256, 1, 1). A thread takes a piece apart.
const int pieces = weight_shape[1] / BlockBytes<TYPE>::value * (BlockNumbers<TYPE>::value / 32);
const uint thread_number = thread_position_in_grid.x;
if (thread_number < uint(pieces) * uint(weight_shape[0])) {
  const int row = int(thread_number / uint(pieces)), number = int(thread_number % uint(pieces));
  const Blocks<TYPE> packed = {weight, uint(weight_shape[1])};
  typename PieceOf<Blocks<TYPE>>::type piece;
  load_piece(packed, row, number, piece);
  UNROLL for (int octet = 0; octet < 4; ++octet) {
    float numbers[8];
    octet_of(piece, octet, numbers);
    device T* to = out + ulong(row) * ulong(32 * pieces) + first_of(packed, number, octet);
    UNROLL for (int i = 0; i < 8; ++i) to[i] = T(numbers[i]);
  }
}
