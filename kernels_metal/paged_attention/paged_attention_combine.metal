// Merges the answers that runs of pages have given to the same query: a mean, weighted by their sums of weights.
//
// A simdgroup merges one row and head. Parts lie `stride` rows apart, because those of one run of pages lie together; the first
// and the number are in `rows` [answers][3]. A sink takes part here, once, and carries no value. Logs and sinks may be so few that
// Metal gets them in constant memory; hence their types.
#include "include/softmax.h"

template <typename T, int DIM, typename Logs, typename Sinks>
inline void combine(const device float* answers, Logs logs, const device int* rows, Sinks sinks, bool has_sinks, device T* out,
                    uint row, uint head, uint heads, uint lane) {
  const int first = rows[3 * row], parts = rows[3 * row + 1], stride = rows[3 * row + 2];
  const float sink = has_sinks ? float(sinks[head]) : kNothing;
  float highest = sink;
  for (int i = int(lane); i < parts; i += 32) highest = max(highest, logs[size_t(first + i * stride) * heads + head]);
  highest = simd_max(highest);
  float sum = 0.0f;
  for (int i = int(lane); i < parts; i += 32) sum += exponential(logs[size_t(first + i * stride) * heads + head] - highest);
  sum = simd_sum(sum) + (has_sinks ? exponential(sink - highest) : 0.0f);
  for (int channel = int(lane); channel < DIM; channel += 32) {
    float answer = 0.0f;
    for (int i = 0; i < parts; ++i) {
      const size_t part = size_t(first + i * stride) * heads + head;
      answer += exponential(logs[part] - highest) * answers[part * DIM + channel];
    }
    out[(size_t(row) * heads + head) * DIM + channel] = static_cast<T>(answer / sum);
  }
}

//: kernel paged_attention_combine(answers, logs, rows, settings, sinks) -> out
//: threads (32, heads, rows), groups of (32, 1, 1)
combine<T, VALUE_DIM>(answers, &logs[0], rows, &sinks[0], settings[2] != 0.0f, out, threadgroup_position_in_grid.z,
                      threadgroup_position_in_grid.y, threadgroups_per_grid.y, thread_index_in_simdgroup);
