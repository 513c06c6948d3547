// A row of x times the matrices of its chosen experts. README.md has the tile and the bytes.
//
// A threadgroup computes 16 rows of a matrix; its simdgroups divide the columns among themselves, 256 numbers at a time. As in products of
// few rows, a lane takes piece `fragment_row` of eight, of four rows of the matrix, and eight lanes add up at the end.
#pragma once

constant constexpr int kRows = 16;  // of a matrix, of a threadgroup
constant constexpr int kOfLane = 4;
constant constexpr int kMostSimdgroups = 8;

// A matrix that is not quantized, [N, K]: a piece is where its numbers lie.
template <typename T>
struct PlainNumbers {
  const device T* numbers;
  int columns;
};

template <typename T>
struct PlainPiece {
  const device T* from;
};

template <typename T>
struct PieceOf<PlainNumbers<T>> {
  typedef PlainPiece<T> type;
};

template <typename T>
inline void load_piece(thread const PlainNumbers<T>& m, int row, int number, thread PlainPiece<T>& piece) {
  piece.from = m.numbers + ulong(row) * ulong(m.columns) + 32 * number;
}

template <typename T>
inline int first_of(thread const PlainNumbers<T>&, int number, int octet) {
  return 32 * number + 8 * octet;
}

template <typename T>
inline void octet_of(thread const PlainPiece<T>& piece, int octet, thread float* numbers) {
  octet_of_x(piece.from + 8 * octet, true, numbers);
}

// The matrix that begins at row `first` of the matrices of all experts.
template <typename S, int BITS, int GROUP>
inline AffineCodes<S, BITS, GROUP> from_row(AffineCodes<S, BITS, GROUP> m, ulong first) {
  m.codes += first * ulong(m.columns / 8 * BITS);
  m.scales += first * ulong(m.columns / GROUP);
  m.biases += first * ulong(m.columns / GROUP);
  return m;
}

inline Mxfp4Codes from_row(Mxfp4Codes m, ulong first) {
  m.codes += first * ulong(m.columns / 2);
  m.scales += first * ulong(m.columns / 32);
  return m;
}

template <typename T>
inline PlainNumbers<T> from_row(PlainNumbers<T> m, ulong first) {
  m.numbers += first * ulong(m.columns);
  return m;
}

// Activations by their numbers: of a gated unit, which has the gates in the first half of the matrix and ups in the second, or of every row.
template <int GATE>
struct SidesOf {
  static constexpr constant int value = GATE == 0 || GATE == 4 ? 1 : 2;
};

// silu (1) and gelu_tanh (2) of the gate times up; gpt-oss's unit (3), with its numbers in thousandths; relu squared (4); nothing (0).
template <int GATE, int ALPHA, int LIMIT>
inline float unit_of(float gate, float up) {
  if (GATE == 0) return gate;
  if (GATE == 4) return gate > 0.0f ? gate * gate : 0.0f;
  if (GATE == 3) {
    constexpr float alpha = float(ALPHA) / 1000.0f, limit = float(LIMIT) / 1000.0f;
    const float least = min(gate, limit);
    return least / (1.0f + precise::exp(-alpha * least)) * (clamp(up, -limit, limit) + 1.0f);
  }
  return activated<GATE == 2 ? 2 : 1>(gate) * up;
}

// Where a thread is.
struct Place {
  int tile, row;  // of threadgroups
  uint simdgroup, simdgroups, lane;
};

// Row of the matrix for sum `index` of four, or the last one there is: what is computed for it is not stored.
template <int SIDES>
inline int row_of_lane(Place place, int rows, int index) {
  const int own = place.tile * (kRows / SIDES) + int(fragment_column(place.lane)) + index % 2, side = index / 2;
  return SIDES == 2 ? min(own, rows / 2 - 1) + side * (rows / 2) : min(own + side * 8, rows - 1);
}

// Adds `share` times the products of piece `number` of x and of four rows of a matrix.
template <typename T, typename M>
inline void add_piece(const device T* x, bool there, thread const M& packed, const thread int* rows, int number, float share, thread float* sums) {
  typename PieceOf<M>::type pieces[kOfLane];
  float products[kOfLane];
  UNROLL for (int c = 0; c < kOfLane; ++c) load_piece(packed, rows[c], number, pieces[c]);
  UNROLL for (int c = 0; c < kOfLane; ++c) products[c] = 0.0f;
  UNROLL for (int octet = 0; octet < 4; ++octet) {
    float numbers[8];
    octet_of_x(x + first_of(packed, number, octet), there, numbers);
    UNROLL for (int c = 0; c < kOfLane; ++c) {
      float weights[8];
      octet_of(pieces[c], octet, weights);
      UNROLL for (int i = 0; i < 8; ++i) products[c] = fma(weights[i], numbers[i], products[c]);
    }
  }
  UNROLL for (int c = 0; c < kOfLane; ++c) sums[c] = fma(share, products[c], sums[c]);
}

// Leaves the simdgroup's sums of 16 rows in `partial`.
inline void share_sums(thread const float* sums, Place place, threadgroup float* partial) {
  UNROLL for (int c = 0; c < kOfLane; ++c) {
    const float sum = sum_of_pieces(sums[c]);
    const int row = c / 2 * 8 + int(fragment_column(place.lane)) + c % 2;
    if (fragment_row(place.lane) == 0) partial[int(place.simdgroup) * kRows + row] = sum;
  }
}

// Adds up what the simdgroups have left for a row, always in the same order.
inline float sum_of_simdgroups(const threadgroup float* partial, Place place, int row) {
  float sum = 0.0f;
  for (uint part = 0; part < place.simdgroups; ++part) sum += partial[int(part) * kRows + row];
  return sum;
}

// One expert's unit: `rows` are those of its matrix. Pair `place.row` of a row of x and an expert, of `count` for each row.
template <int GATE, int ALPHA, int LIMIT, int BIASED, typename T, typename M, typename C>
inline void into_expert(const device T* x, C chosen, M packed, const device T* bias, device T* out, int count, int rows, Place place, threadgroup float* partial) {
  constexpr int sides = SidesOf<GATE>::value, columns = kRows / sides;
  const int width = rows / sides, pieces = packed.columns / 32;
  const ulong first = ulong(chosen[place.row]) * ulong(rows);
  const M own = from_row(packed, first);
  const device T* from = x + ulong(place.row / count) * ulong(packed.columns);
  int of_lane[kOfLane];
  float sums[kOfLane];
  UNROLL for (int c = 0; c < kOfLane; ++c) {
    of_lane[c] = row_of_lane<sides>(place, rows, c);
    sums[c] = 0.0f;
  }
  ROLLED for (int block = int(place.simdgroup); 8 * block < pieces; block += int(place.simdgroups)) {
    const int wanted = 8 * block + int(fragment_row(place.lane)), number = min(wanted, pieces - 1);
    add_piece(from, wanted == number, own, of_lane, number, 1.0f, sums);
  }
  share_sums(sums, place, partial);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int i = int(32 * place.simdgroup + place.lane), column = place.tile * columns + i;
  if (i < columns && column < width) {
    float gate = sum_of_simdgroups(partial, place, i), up = sides == 2 ? sum_of_simdgroups(partial, place, i + columns) : 0.0f;
    if (BIASED != 0) {
      gate += float(bias[first + ulong(column)]);
      if (sides == 2) up += float(bias[first + ulong(width + column)]);
    }
    out[ulong(place.row) * ulong(width) + ulong(column)] = T(unit_of<GATE, ALPHA, LIMIT>(gate, up));
  }
}

// The results of `count` experts of row `place.row`, added up by their shares. The pieces of all experts follow one another.
template <int BIASED, int ADDED, typename T, typename M, typename C, typename S>
inline void out_of_experts(
    const device T* x, C chosen, S shares, M packed, const device T* bias, const device T* added, device T* out, int count, int rows, Place place, threadgroup float* partial) {
  const int pieces = packed.columns / 32, most = count * pieces, first = place.row * count;
  int of_lane[kOfLane];
  float sums[kOfLane];
  UNROLL for (int c = 0; c < kOfLane; ++c) {
    of_lane[c] = row_of_lane<1>(place, rows, c);
    sums[c] = 0.0f;
  }
  ROLLED for (int block = int(place.simdgroup); 8 * block < most; block += int(place.simdgroups)) {
    const int wanted = 8 * block + int(fragment_row(place.lane)), piece = min(wanted, most - 1);
    const int pair = first + piece / pieces;
    const M own = from_row(packed, ulong(chosen[pair]) * ulong(rows));
    add_piece(x + ulong(pair) * ulong(packed.columns), wanted == piece, own, of_lane, piece % pieces, shares[pair], sums);
  }
  share_sums(sums, place, partial);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int i = int(32 * place.simdgroup + place.lane), row = place.tile * kRows + i;
  if (i < kRows && row < rows) {
    float sum = sum_of_simdgroups(partial, place, i);
    if (BIASED != 0) {
      for (int pair = first; pair < first + count; ++pair) sum = fma(shares[pair], float(bias[ulong(chosen[pair]) * ulong(rows) + ulong(row)]), sum);
    }
    const ulong at = ulong(place.row) * ulong(rows) + ulong(row);
    if (ADDED != 0) sum += float(added[at]);
    out[at] = T(sum);
  }
}
