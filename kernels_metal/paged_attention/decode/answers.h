// Decode attention: what lanes and simdgroups have, added up and stored.
#pragma once
#include "paged_attention/decode/work.h"
#include "paged_attention/parts.h"

// Adds up over lanes: afterwards every lane has the sums and its channels' answers of all its simdgroup's tokens.
template <typename D>
inline void add_lanes(Place place, thread State<D>& state) {
  UNROLL for (int i = 0; i < D::QUERIES; ++i) {
    state.softmax[i].sum = simd_sum(state.softmax[i].sum);
    thread float* answers = state.answers + i * D::RUNS * D::VALUE_RUN;
    UNROLL for (int mask = D::VALUE_LANES; mask < 32; mask *= 2) {
      UNROLL for (int j = 0; j < D::RUNS * D::VALUE_RUN; ++j) answers[j] += simd_shuffle_xor(answers[j], ushort(mask));
    }
    if (D::V_BITS == 16) continue;
    UNROLL for (int g = 0; g < D::GROUPS; ++g) {
      const float bias = simd_sum(state.biases[i * D::GROUPS + g]);
      UNROLL for (int run = 0; run < D::RUNS; ++run) {
        const int part = run * D::VALUE_LANES + int(place.lane) % D::VALUE_LANES;
        const float own = part * D::VALUE_RUN / D::GROUP == g ? bias : 0.0f;
        UNROLL for (int j = 0; j < D::VALUE_RUN; ++j) answers[run * D::VALUE_RUN + j] += own;
      }
    }
  }
}

// Where answers go, `row` counting rows and heads. The answer to all that a row sees is final, in T; a sink takes part in its softmax
// without a value. If any sequence is divided, all answers are parts, merged later, when a sink takes part (parts.h).
template <typename T, typename Sinks>
struct Out {
  device T* answers;
  device T* parts;
  Sinks sinks;
  bool has_sinks, divided;
};

template <typename T, typename Sinks>
inline void store(Out<T, Sinks> out, size_t row, int head, int dim, int channel, float answer, OnlineSoftmax softmax) {
  float sum = softmax.sum;
  if (out.has_sinks && !out.divided) sum += exponential(float(out.sinks[head]) - softmax.maximum);
  const float whole = sum > 0.0f ? answer / sum : 0.0f;
  if (out.divided) {
    device T* part = out.parts + row * (dim + PartLog<T>::size);
    part[channel] = static_cast<T>(whole);
    if (channel == 0) *(device float*)(part + dim) = sum > 0.0f ? softmax.maximum + log(sum) : kNothing;
  } else {
    out.answers[row * dim + channel] = static_cast<T>(whole);
  }
}

// Every simdgroup stores the answers of its own queries.
template <typename D, typename Out>
inline void store_own(Out out, Item item, int kv_head, int kv_heads, int first_query, Place place, thread State<D>& state) {
  if (int(place.lane) >= D::VALUE_LANES) return;
  UNROLL for (int i = 0; i < D::QUERIES; ++i) {
    const int query = first_query + i, head = kv_head * D::HEADS + query % D::HEADS;
    if (query >= item.count * D::HEADS) continue;
    const size_t row = size_t(item.out + query / D::HEADS) * (kv_heads * D::HEADS) + head;
    UNROLL for (int run = 0; run < D::RUNS; ++run) {
      const int part = run * D::VALUE_LANES + int(place.lane);
      if (part >= D::PARTS) continue;
      UNROLL for (int j = 0; j < D::VALUE_RUN; ++j) {
        const float answer = state.answers[(i * D::RUNS + run) * D::VALUE_RUN + j];
        store(out, row, head, D::VALUE_DIM, part * D::VALUE_RUN + j, answer, state.softmax[i]);
      }
    }
  }
}

// Merges what the simdgroups have of the same queries, one query after another through `merged` [SIMDGROUPS][VALUE_DIM],
// where the weights have been.
template <typename D, typename Out>
inline void store_merged(Out out, Item item, int kv_head, int kv_heads, Place place, threadgroup float* merged,
                         threadgroup float* softmaxes, thread State<D>& state) {
  UNROLL for (int i = 0; i < D::QUERIES; ++i) {
    if (place.lane == 0) {
      softmaxes[(place.simdgroup * D::QUERIES + i) * 2] = state.softmax[i].maximum;
      softmaxes[(place.simdgroup * D::QUERIES + i) * 2 + 1] = state.softmax[i].sum;
    }
  }
  UNROLL for (int i = 0; i < D::QUERIES; ++i) {
    if (i >= item.count * D::HEADS) break;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    OnlineSoftmax whole = empty_softmax();
    UNROLL for (int s = 0; s < D::SIMDGROUPS; ++s) whole.maximum = max(whole.maximum, softmaxes[(s * D::QUERIES + i) * 2]);
    UNROLL for (int s = 0; s < D::SIMDGROUPS; ++s) {
      const threadgroup float* of = softmaxes + (s * D::QUERIES + i) * 2;
      whole.sum += of[1] * exponential(of[0] - whole.maximum);
    }
    const float shrink = exponential(state.softmax[i].maximum - whole.maximum);
    UNROLL for (int j = 0; j < D::RUNS * D::VALUE_RUN; ++j) {
      const int part = j / D::VALUE_RUN * D::VALUE_LANES + int(place.lane);
      if (int(place.lane) >= D::VALUE_LANES || part >= D::PARTS) continue;
      merged[place.simdgroup * D::VALUE_DIM + part * D::VALUE_RUN + j % D::VALUE_RUN] =
          state.answers[i * D::RUNS * D::VALUE_RUN + j] * shrink;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int head = kv_head * D::HEADS + i % D::HEADS;
    const size_t row = size_t(item.out + i / D::HEADS) * (kv_heads * D::HEADS) + head;
    for (int channel = int(place.index); channel < D::VALUE_DIM; channel += 32 * D::SIMDGROUPS) {
      float answer = 0.0f;
      UNROLL for (int s = 0; s < D::SIMDGROUPS; ++s) answer += merged[s * D::VALUE_DIM + channel];
      store(out, row, head, D::VALUE_DIM, channel, answer, whole);
    }
  }
}
