// 8x8 matrices spread over a simdgroup, two neighbours of a row in each lane, where Apple's GPUs have them (and MLX counts on it):
// lane l holds row (l/16)*4 + (l/2)%4, columns (l%16/8)*4 + (l%2)*2 and the next one.
#pragma once

namespace metal {

inline uint __matrix_row(uint lane) { return lane / 16 * 4 + lane / 2 % 4; }
inline uint __matrix_column(uint lane) { return lane % 16 / 8 * 4 + lane % 2 * 2; }
inline uint __matrix_lane(uint row, uint column) { return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column % 4 / 2; }

template <typename T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8x8");
  vec<T, 2> elements;

  simdgroup_matrix() thread {}  // thread alone, as in Apple's: members have none that their struct could call
  explicit simdgroup_matrix(T diagonal) {
    const uint row = __matrix_row(__emu_lane()), column = __matrix_column(__emu_lane());
    elements[0] = row == column ? diagonal : T(0);
    elements[1] = row == column + 1 ? diagonal : T(0);
  }
  thread vec<T, 2>& thread_elements() thread { return elements; }
  const thread vec<T, 2>& thread_elements() const thread { return elements; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int C, int R>
inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.elements = value;
  return m;
}
template <typename T, int C, int R>
inline simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, C, R>(value);
}

#define EMU_MATRIX_MEMORY(SPACE)                                                                             \
  template <typename T>                                                                                      \
  inline void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const SPACE T* from, ulong per_row = 8,    \
                             ulong2 origin = ulong2{0, 0}, bool transpose = false, EMU_PLACE) {              \
    __emu_meet(1, 0, file, line);                                                                            \
    const ulong row = __matrix_row(__emu_lane()), column = __matrix_column(__emu_lane());                    \
    from += origin.y * per_row + origin.x;                                                                   \
    m.elements[0] = transpose ? from[column * per_row + row] : from[row * per_row + column];                 \
    m.elements[1] = transpose ? from[(column + 1) * per_row + row] : from[row * per_row + column + 1];       \
  }                                                                                                          \
  template <typename T>                                                                                      \
  inline void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& m, SPACE T* to, ulong per_row = 8,     \
                              ulong2 origin = ulong2{0, 0}, bool transpose = false, EMU_PLACE) {             \
    __emu_meet(1, 0, file, line);                                                                            \
    const ulong row = __matrix_row(__emu_lane()), column = __matrix_column(__emu_lane());                    \
    to += origin.y * per_row + origin.x;                                                                     \
    to[transpose ? column * per_row + row : row * per_row + column] = m.elements[0];                         \
    to[transpose ? (column + 1) * per_row + row : row * per_row + column + 1] = m.elements[1];               \
  }
EMU_MATRIX_MEMORY(device)
EMU_MATRIX_MEMORY(threadgroup)
#undef EMU_MATRIX_MEMORY

// d = a b + c, summed in float32 and rounded once.
template <typename D, typename A, typename B, typename C>
EMU_UNTRACED inline void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
                                                       const thread simdgroup_matrix<B, 8, 8>& b,
                                                       const thread simdgroup_matrix<C, 8, 8>& c, EMU_PLACE) {
  const uint row = __matrix_row(__emu_lane()), column = __matrix_column(__emu_lane());
  float sums[2] = {float(c.elements[0]), float(c.elements[1])};
  float left[8];
  const thread vec<A, 2>* lefts = __exchange(a.elements, file, line);
  for (uint k = 0; k < 8; k++) left[k] = float(lefts[__matrix_lane(row, k)][k % 2]);
  const thread vec<B, 2>* rights = __exchange(b.elements, file, line);
  for (uint k = 0; k < 8; k++) {
    const vec<B, 2> right = rights[__matrix_lane(k, column)];
    sums[0] += left[k] * float(right[0]);
    sums[1] += left[k] * float(right[1]);
  }
  d.elements[0] = D(sums[0]);
  d.elements[1] = D(sums[1]);
}
template <typename D, typename A, typename B>
inline void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
                               const thread simdgroup_matrix<B, 8, 8>& b, EMU_PLACE) {
  const simdgroup_matrix<float, 8, 8> zero = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(d, a, b, zero, file, line);
}

}  // namespace metal
