// A part's result added to the residual stream, and the norm of the sum that the next part reads. README.md has the arithmetic.
//
// A threadgroup has one row, of which a thread keeps PER runs of 4 neighbours in registers: every number is read once.
#include "include/unroll.h"

template <int DIM, int SIMDGROUPS>
struct Row {
  static constexpr constant int THREADS = 32 * SIMDGROUPS;
  static constexpr constant int PER = (DIM + 4 * THREADS - 1) / (4 * THREADS);
};

// The sum over all threads of a threadgroup, in the same order whatever runs first; `parts` [SIMDGROUPS] serves one sum only.
template <int SIMDGROUPS>
inline float sum_of_all(float x, threadgroup float* parts, uint simdgroup, uint lane) {
  x = simd_sum(x);
  if (SIMDGROUPS == 1) return x;
  if (lane == 0) parts[simdgroup] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) sum += parts[s];
  return sum;
}

// Norms the values of a row in place, rounding where `mx.fast.rms_norm` does. The weight may lie in constant memory, hence its type.
template <typename T, typename R, int DIM, int SIMDGROUPS, typename Weight>
inline void norm(thread float* values, Weight weight, float eps, threadgroup float* parts, uint index, uint simdgroup, uint lane) {
  float squares = 0.0f;
  UNROLL for (int i = 0; i < 4 * R::PER; ++i) squares += values[i] * values[i];
  const float scale = precise::rsqrt(sum_of_all<SIMDGROUPS>(squares, parts, simdgroup, lane) / float(DIM) + eps);
  UNROLL for (int i = 0; i < R::PER; ++i) {
    UNROLL for (int j = 0; j < 4; ++j) {
      const int channel = 4 * (i * R::THREADS + int(index)) + j;
      if (channel < DIM) values[4 * i + j] = float(static_cast<T>(float(weight[channel]) * float(static_cast<T>(values[4 * i + j] * scale))));
    }
  }
}

// A run beyond the row's end is zero.
template <typename T, typename R, int DIM>
inline void read(const device T* row, thread float* values, uint index) {
  UNROLL for (int i = 0; i < R::PER; ++i) {
    UNROLL for (int j = 0; j < 4; ++j) {
      const int channel = 4 * (i * R::THREADS + int(index)) + j;
      values[4 * i + j] = channel < DIM ? float(row[channel]) : 0.0f;
    }
  }
}

template <typename T, typename R, int DIM>
inline void write(device T* row, const thread float* values, uint index) {
  UNROLL for (int i = 0; i < R::PER; ++i) {
    UNROLL for (int j = 0; j < 4; ++j) {
      const int channel = 4 * (i * R::THREADS + int(index)) + j;
      if (channel < DIM) row[channel] = static_cast<T>(values[4 * i + j]);
    }
  }
}

//: kernel add_norm(result, stream, after, before, bias, settings) -> sums, normed
//: threads (32 SIMDGROUPS, rows, 1), groups of (32 SIMDGROUPS, 1, 1). `settings`: both epsilons, the factor of the result, that of the sum.
//: Without BEFORE, `normed` has one element.
typedef Row<DIM, SIMDGROUPS> R;
threadgroup float parts[2 * SIMDGROUPS];
const uint index = thread_position_in_threadgroup.x, simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const size_t start = size_t(threadgroup_position_in_grid.y) * DIM;
float values[4 * R::PER], sum[4 * R::PER];
read<T, R, DIM>(result + start, values, index);
if (BIASED) {
  UNROLL for (int i = 0; i < 4 * R::PER; ++i) {
    const int channel = 4 * (i / 4 * R::THREADS + int(index)) + i % 4;
    if (channel < DIM) values[i] = float(static_cast<T>(values[i] + float(bias[channel])));
  }
}
if (AFTER) norm<T, R, DIM, SIMDGROUPS>(values, &after[0], settings[0], parts, index, simdgroup, lane);
read<T, R, DIM>(stream + start, sum, index);
UNROLL for (int i = 0; i < 4 * R::PER; ++i) sum[i] = float(static_cast<T>(sum[i] + values[i] * settings[2]));
UNROLL for (int i = 0; i < 4 * R::PER; ++i) sum[i] = float(static_cast<T>(sum[i] * settings[3]));
write<T, R, DIM>(sums + start, sum, index);
if (BEFORE) {
  norm<T, R, DIM, SIMDGROUPS>(sum, &before[0], settings[1], parts + SIMDGROUPS, index, simdgroup, lane);
  write<T, R, DIM>(normed + start, sum, index);
} else if (index == 0 && threadgroup_position_in_grid.y == 0) {
  normed[0] = static_cast<T>(0.0f);
}
