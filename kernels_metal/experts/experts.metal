// Experts of few rows in two launches: into the inner layer with its activation, and out of it with the weighted sum over experts.
//
// README.md has the tile and the bytes, experts.h the arithmetic, codes_of_mlx.h the formats.
#include "include/codes.h"
#include "include/fragments.h"

// The registers of a lane that hold 32 numbers of a row, for each kind of matrix.
template <typename M>
struct PieceOf;

#include "quantized_matmul/codes_of_mlx.h"
#include "quantized_matmul/lanes.h"
#include "experts/experts.h"

//: kernel affine_experts_in(x, chosen, weight, scales, biases, bias) -> out
//: threads (32 * simdgroups * rows of x times experts of a row, tiles of 16 rows of a matrix, 1), groups of (32 * simdgroups, 1, 1), at
//: most 8 simdgroups
threadgroup float partial[kMostSimdgroups * kRows];
const Place place = {int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), simdgroup_index_in_threadgroup,
                     simdgroups_per_threadgroup, thread_index_in_simdgroup};
const AffineCodes<T, BITS, GROUP> packed = {(const device uchar*)weight, scales, biases, x_shape[1]};
into_expert<GATE, ALPHA, LIMIT, BIASED>(x, chosen, packed, bias, out, chosen_shape[1], weight_shape[1], place, partial);

//: kernel mxfp4_experts_in(x, chosen, weight, scales, bias) -> out
//: threads as for affine_experts_in
threadgroup float partial[kMostSimdgroups * kRows];
const Place place = {int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), simdgroup_index_in_threadgroup,
                     simdgroups_per_threadgroup, thread_index_in_simdgroup};
const Mxfp4Codes packed = {(const device uchar*)weight, scales, x_shape[1]};
into_expert<GATE, ALPHA, LIMIT, BIASED>(x, chosen, packed, bias, out, chosen_shape[1], weight_shape[1], place, partial);

//: kernel plain_experts_in(x, chosen, weight, bias) -> out
//: threads as for affine_experts_in
threadgroup float partial[kMostSimdgroups * kRows];
const Place place = {int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), simdgroup_index_in_threadgroup,
                     simdgroups_per_threadgroup, thread_index_in_simdgroup};
const PlainNumbers<T> packed = {weight, x_shape[1]};
into_expert<GATE, ALPHA, LIMIT, BIASED>(x, chosen, packed, bias, out, chosen_shape[1], weight_shape[1], place, partial);

//: kernel affine_experts_out(x, chosen, shares, weight, scales, biases, bias, added) -> out
//: threads (32 * simdgroups * rows of the result, tiles of 16 rows of a matrix, 1), groups of (32 * simdgroups, 1, 1), at most 8 simdgroups
threadgroup float partial[kMostSimdgroups * kRows];
const Place place = {int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), simdgroup_index_in_threadgroup,
                     simdgroups_per_threadgroup, thread_index_in_simdgroup};
const AffineCodes<T, BITS, GROUP> packed = {(const device uchar*)weight, scales, biases, x_shape[2]};
out_of_experts<BIASED, ADDED>(x, chosen, shares, packed, bias, added, out, chosen_shape[1], weight_shape[1], place, partial);

//: kernel mxfp4_experts_out(x, chosen, shares, weight, scales, bias, added) -> out
//: threads as for affine_experts_out
threadgroup float partial[kMostSimdgroups * kRows];
const Place place = {int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), simdgroup_index_in_threadgroup,
                     simdgroups_per_threadgroup, thread_index_in_simdgroup};
const Mxfp4Codes packed = {(const device uchar*)weight, scales, x_shape[2]};
out_of_experts<BIASED, ADDED>(x, chosen, shares, packed, bias, added, out, chosen_shape[1], weight_shape[1], place, partial);

//: kernel plain_experts_out(x, chosen, shares, weight, bias, added) -> out
//: threads as for affine_experts_out
threadgroup float partial[kMostSimdgroups * kRows];
const Place place = {int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), simdgroup_index_in_threadgroup,
                     simdgroups_per_threadgroup, thread_index_in_simdgroup};
const PlainNumbers<T> packed = {weight, x_shape[2]};
out_of_experts<BIASED, ADDED>(x, chosen, shares, packed, bias, added, out, chosen_shape[1], weight_shape[1], place, partial);
