// Merges the answers that runs of pages have given to the same query: a mean, weighted by their sums of weights.
//
// A simdgroup merges one row and head. Parts (parts.h) lie `stride` rows apart, because those of one run of pages lie together; the first
// and the number are in `rows` [answers][3]. A sink takes part here, once, and carries no value.
#include "include/softmax.h"
#include "paged_attention/parts.h"

template <typename T, int DIM, typename Sink>
inline void combine(const device T* parts, const device int* rows, const device Sink* sinks, bool has_sinks, device T* out,
                    uint row, uint head, uint heads, uint lane) {
  const int count = rows[3 * row + 1];
  constexpr int width = DIM + PartLog<T>::size;
  const size_t stride = size_t(rows[3 * row + 2]) * heads * width;
  const device T* first = parts + (size_t(rows[3 * row]) * heads + head) * width;
  const float sink = has_sinks ? float(sinks[head]) : kNothing;
  float highest = sink;
  for (int i = int(lane); i < count; i += 32) highest = max(highest, part_log<DIM>(first + i * stride));
  highest = simd_max(highest);
  float sum = 0.0f;
  for (int i = int(lane); i < count; i += 32) sum += exponential(part_log<DIM>(first + i * stride) - highest);
  sum = simd_sum(sum) + (has_sinks ? exponential(sink - highest) : 0.0f);
  for (int channel = int(lane); channel < DIM; channel += 32) {
    float answer = 0.0f;
    for (int i = 0; i < count; ++i) answer += exponential(part_log<DIM>(first + i * stride) - highest) * float(first[i * stride + channel]);
    out[(size_t(row) * heads + head) * DIM + channel] = static_cast<T>(answer / sum);
  }
}

//: kernel paged_attention_combine(parts, rows, settings, sinks) -> out
//: threads (32, heads, rows), groups of (32, 1, 1)
combine<T, VALUE_DIM>(parts, rows, sinks, settings[2] != 0.0f, out, threadgroup_position_in_grid.z, threadgroup_position_in_grid.y,
                      threadgroups_per_grid.y, thread_index_in_simdgroup);
