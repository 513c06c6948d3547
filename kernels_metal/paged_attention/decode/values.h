// Decode attention: from products to weights, and the weighted values of a page.
#pragma once
#include "paged_attention/decode/sharing.h"

// Products of the own tokens to weights, in place. All that was added up before shrinks to the new maximum.
template <typename D, bool QUANTIZED>
inline void weigh(Item item, int page, int first_query, float scale, float softcap, Place place, thread float* products,
                  thread State<D>& state) {
  const int token = own_token<D>(place.lane);
  const int position = page * 64 + token;
  const threadgroup half* scales = (const threadgroup half*)place.value_scales + token * D::GROUPS;
  float biases[2 * D::GROUPS];
  UNROLL for (int g = 0; g < 2 * D::GROUPS; ++g) {
    biases[g] = QUANTIZED ? middle_of<D::V_BITS>(float(scales[g]), float(scales[64 * D::GROUPS + g])) : 0.0f;
  }
  UNROLL for (int i = 0; i < D::QUERIES; ++i) {
    const int row = (first_query + i) / D::HEADS;
    const int newest = item.past + row, oldest = item.oldest + row;
    const bool sees = position >= oldest && position <= newest, sees_next = position + 1 >= oldest && position + 1 <= newest;
    const float score = score_of(products[i * D::KEY_RUN], scale, softcap);
    const float next = score_of(products[i * D::KEY_RUN + 1], scale, softcap);
    const float highest = max(sees ? score : kNothing, sees_next ? next : kNothing);
    const float shrink = raise_maximum(state.softmax[i], simd_max(highest));
    const float weight = weight_of(state.softmax[i], score, sees), next_weight = weight_of(state.softmax[i], next, sees_next);
    products[i * D::KEY_RUN] = weight;
    products[i * D::KEY_RUN + 1] = next_weight;
    UNROLL for (int j = 0; j < D::RUNS * D::VALUE_RUN; ++j) state.answers[i * D::RUNS * D::VALUE_RUN + j] *= shrink;
    UNROLL for (int g = 0; g < D::GROUPS; ++g) {
      const float bias = weight * biases[g] + next_weight * biases[D::GROUPS + g];
      state.biases[i * D::GROUPS + g] = state.biases[i * D::GROUPS + g] * shrink + bias;
    }
  }
}

// Adds weighted values of tokens first to last. V's scale is multiplied into the weight instead of into a run of codes.
template <typename D, int BITS, typename Rows>
inline void add_values(Rows rows, int first, int last, Place place, thread State<D>& state) {
  typedef Element<typename D::T, BITS> E;
  constexpr int bytes = D::VALUE_RUN * E::bits / 8, words = (bytes + 3) / 4;
  constexpr int fit = words > 8 ? 1 : words > 4 ? 2 : words > 2 ? 4 : 8, steps = ValueRows<D, BITS>::part / D::VALUE_ROWS;
  constexpr int ahead = fit < steps ? fit : steps;  // loads before the first use
  const threadgroup half* scales = (const threadgroup half*)place.value_scales;
  ROLLED for (int begin = first; begin < last; begin += ahead * D::VALUE_ROWS) {
    UNROLL for (int run = 0; run < D::RUNS; ++run) {
      const int part = run * D::VALUE_LANES + int(place.lane) % D::VALUE_LANES;
      uint codes[ahead * words];
      UNROLL for (int step = 0; step < ahead; ++step) {
        const int token = begin + step * D::VALUE_ROWS + int(place.lane) / D::VALUE_LANES;
        UNROLL for (int i = 0; i < words; ++i) codes[step * words + i] = 0;
        if (token < last && part < D::PARTS) {
          load_run<bytes, LoadWidth<bytes, ValueRows<D, BITS>::bytes>::value>(rows, token - first, part * bytes, codes + step * words);
        }
      }
      UNROLL for (int step = 0; step < ahead; ++step) {
        const int token = begin + step * D::VALUE_ROWS + int(place.lane) / D::VALUE_LANES;
        if (token >= last || part >= D::PARTS) continue;
        const float scale = E::quantized ? float(scales[token * D::GROUPS + part * D::VALUE_RUN / D::GROUP]) : 1.0f;
        float numbers[D::VALUE_RUN];
        UNROLL for (int j = 0; j < D::VALUE_RUN; ++j) numbers[j] = centred_value_at<typename D::T, BITS>(codes + step * words, j);
        UNROLL for (int i = 0; i < D::QUERIES; ++i) {
          const float weight = place.weights[(token - first) * D::QUERIES + i] * scale;
          UNROLL for (int j = 0; j < D::VALUE_RUN; ++j) state.answers[(i * D::RUNS + run) * D::VALUE_RUN + j] += weight * numbers[j];
        }
      }
    }
  }
}

// Weights to threadgroup memory, then the values of `present` tokens, part by part.
template <typename D, int BITS, typename Values>
inline void add_page(Values values, int present, bool active, Place place, thread float* weights, thread State<D>& state) {
  constexpr int bytes = ValueRows<D, BITS>::bytes, part = ValueRows<D, BITS>::part;
  const int token = own_token<D>(place.lane);
  for (int first = 0; first < present; first += part) {
    const int last = min(first + part, present);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (token >= first && token < first + part) {
      UNROLL for (int i = 0; i < D::QUERIES; ++i) {
        place.weights[(token - first) * D::QUERIES + i] = weights[i * D::KEY_RUN];
        place.weights[(token - first + 1) * D::QUERIES + i] = weights[i * D::KEY_RUN + 1];
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    auto rows = rows_of<D>(Sharing<D::SHARED>(), part_of(values, first, 0, bytes), last - first, bytes, bytes, place);
    if (active) add_values<D, BITS>(rows, first, last, place, state);
  }
}
