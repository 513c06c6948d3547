#pragma once

// Sums across lanes and transposition of square blocks, for *.kernels.cpp files.

#include "simd/simd.h"

namespace mlxinfer::cpu::MLXINFER_ISA {

template <int... I>
struct Lanes {};
#if defined(__clang__)
template <typename, int... I>
using LanesOf = Lanes<I...>;
template <int N>
using LanesUpTo = __make_integer_seq<LanesOf, int, N>;
#else
template <int N>
using LanesUpTo = Lanes<__integer_pack(N)...>;
#endif

// Each function below maps a lane of the result to a lane of a (0 to kWidth - 1) or b (kWidth and up).
template <typename V, typename Pick, int... I>
MLXINFER_INLINE V shuffle(V a, V b, Pick, Lanes<I...>) {
  return __builtin_shufflevector(a, b, Pick::lane(I)...);
}
template <typename Pick, typename V>
MLXINFER_INLINE V shuffle(V a, V b) {
  return shuffle(a, b, Pick{}, LanesUpTo<kWidth>{});
}

// Within each 128 bits: items of `Size` lanes from the low (Half 0) or high halves of a and b in turn.
template <int Size, int Half>
struct Interleave {
  static constexpr int lane(int i) {
    int within = i % 4, item = within / Size;
    return (i / 4) * 4 + Half * 2 + (item / 2) * Size + within % Size + (item % 2) * kWidth;
  }
};
// The even (Odd 0) or odd 128-bit parts of a, then those of b.
template <int Odd>
struct Parts {
  static constexpr int lane(int i) {
    int part = i / 4 * 2 + Odd, parts = kWidth / 4;
    return (part % parts) * 4 + i % 4 + (part / parts) * kWidth;
  }
};
template <int Distance>
struct Swap {
  static constexpr int lane(int i) {
    return i ^ Distance;
  }
};

// Result i has lane i of every input in order. (Four rows become four columns per 128 bits; the 128-bit parts are then transposed.)
MLXINFER_INLINE void transpose(F32 (&rows)[kWidth]) {
  constexpr int quads = kWidth / 4;
  F32 columns[4][quads];
  MLXINFER_UNROLL
  for (int q = 0; q < quads; ++q) {
    const F32 *r = rows + 4 * q;
    F32 a = shuffle<Interleave<1, 0>>(r[0], r[1]), b = shuffle<Interleave<1, 1>>(r[0], r[1]);
    F32 c = shuffle<Interleave<1, 0>>(r[2], r[3]), d = shuffle<Interleave<1, 1>>(r[2], r[3]);
    columns[0][q] = shuffle<Interleave<2, 0>>(a, c);
    columns[1][q] = shuffle<Interleave<2, 1>>(a, c);
    columns[2][q] = shuffle<Interleave<2, 0>>(b, d);
    columns[3][q] = shuffle<Interleave<2, 1>>(b, d);
  }
  MLXINFER_UNROLL
  for (int j = 0; j < 4; ++j) {
    F32(&c)[quads] = columns[j];
    if constexpr (quads == 2) {
      F32 even = shuffle<Parts<0>>(c[0], c[1]), odd = shuffle<Parts<1>>(c[0], c[1]);
      c[0] = even;
      c[1] = odd;
    } else if constexpr (quads == 4) {
      F32 even_low = shuffle<Parts<0>>(c[0], c[1]), odd_low = shuffle<Parts<1>>(c[0], c[1]);
      F32 even_high = shuffle<Parts<0>>(c[2], c[3]), odd_high = shuffle<Parts<1>>(c[2], c[3]);
      c[0] = shuffle<Parts<0>>(even_low, even_high);
      c[1] = shuffle<Parts<0>>(odd_low, odd_high);
      c[2] = shuffle<Parts<1>>(even_low, even_high);
      c[3] = shuffle<Parts<1>>(odd_low, odd_high);
    }
  }
  MLXINFER_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    rows[i] = columns[i % 4][i / 4];
  }
}

template <int Distance, typename V, typename Combine>
MLXINFER_INLINE auto across(V v, Combine combine) {
  if constexpr (Distance == 0) {
    return v[0];
  } else {
    return across<Distance / 2>(combine(v, shuffle<Swap<Distance>>(v, v)), combine);
  }
}
MLXINFER_INLINE float sum_across(F32 v) {
  return across<kWidth / 2>(v, [](F32 a, F32 b) { return a + b; });
}
MLXINFER_INLINE int32_t sum_across(I32 v) {
  return across<kWidth / 2>(v, [](I32 a, I32 b) { return a + b; });
}
MLXINFER_INLINE float max_across(F32 v) {
  return across<kWidth / 2>(v, [](F32 a, F32 b) { return max(a, b); });
}

} // namespace mlxinfer::cpu::MLXINFER_ISA
