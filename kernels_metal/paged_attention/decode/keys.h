// Decode attention: products of queries with the keys of a page.
#pragma once
#include "paged_attention/decode/queries.h"
#include "paged_attention/decode/sharing.h"

// Products of queries with channels first to last of a channel-major page: products[query][token of the lane's run] gets the
// part of the lane's channels, offsets[query] the part of the biases, the same for all tokens. A scale is multiplied into the
// query instead of into 64 codes.
template <typename D, int BITS, typename Rows, typename Scales, typename Queries>
inline void multiply_channels(Rows rows, Scales scales, Queries queries, int first, int last, uint lane, thread float* products,
                              thread float* offsets) {
  typedef Element<typename D::T, BITS> E;
  constexpr int bytes = D::KEY_RUN * E::bits / 8, words = (bytes + 3) / 4, steps = 32 / D::KEY_ROWS;
  constexpr int ahead = steps * words <= 16 ? steps : words <= 4 ? 4 : words <= 8 ? 2 : 1;  // loads before the first use
  const int part = lane % D::KEY_LANES, row = lane / D::KEY_LANES;
  ROLLED for (int block = first; block < last; block += 32) {
    const int own = block + int(lane);
    const bool there = own < last;
    const float scale = there && E::quantized ? float(scales[own]) : 1.0f;
    const float bias = there && E::quantized ? middle_of<BITS>(scale, float(scales[D::KEY_DIM + own])) : 0.0f;
    float scaled[D::QUERIES];
    UNROLL for (int i = 0; i < D::QUERIES; ++i) {
      const float x = there ? query_at<D>(queries, i, own) : 0.0f;
      scaled[i] = x * scale;
      offsets[i] += x * bias;
    }
    for (int some = 0; some < steps && block + some * D::KEY_ROWS < last; some += ahead) {
      uint codes[ahead * words];
      UNROLL for (int step = 0; step < ahead; ++step) {
        const int channel = block + (some + step) * D::KEY_ROWS + row;
        UNROLL for (int i = 0; i < words; ++i) codes[step * words + i] = 0;
        if (channel < last) {
          load_run<bytes, LoadWidth<bytes, 8 * E::bits>::value>(rows, channel - first, part * bytes, codes + step * words);
        }
      }
      UNROLL for (int step = 0; step < ahead; ++step) {
        float numbers[D::KEY_RUN];
        UNROLL for (int j = 0; j < D::KEY_RUN; ++j) numbers[j] = centred_value_at<typename D::T, BITS>(codes + step * words, j);
        UNROLL for (int i = 0; i < D::QUERIES; ++i) {
          const float x = simd_shuffle(scaled[i], ushort((some + step) * D::KEY_ROWS + row));
          UNROLL for (int j = 0; j < D::KEY_RUN; ++j) products[i * D::KEY_RUN + j] += x * numbers[j];
        }
      }
    }
  }
}

// The two tokens whose scores and weights this lane makes: this one and the next.
template <typename D>
inline int own_token(uint lane) {
  return int(lane % D::KEY_LANES) * D::KEY_RUN + int(lane / D::KEY_LANES) * 2;
}

// Two lanes halve what they have of 2 * HALF tokens: each keeps one half and gives the other half away.
template <typename D, int HALF, int MASK>
inline void halve(thread float* products, uint lane) {
  const bool upper = (lane & uint(MASK)) != 0;
  UNROLL for (int i = 0; i < D::QUERIES; ++i) {
    UNROLL for (int j = 0; j < HALF; ++j) {
      const float low = products[i * D::KEY_RUN + j], high = products[i * D::KEY_RUN + HALF + j];
      products[i * D::KEY_RUN + j] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, ushort(MASK));
    }
  }
}

// Adds up the products of the lanes that have read different channels of the same tokens; products[query][0..1] are then those of
// the own tokens.
template <typename D>
inline void add_channels(thread float* products, uint lane) {
  if (D::KEY_RUN == 16) {
    halve<D, 8, 16>(products, lane);
    halve<D, 4, 8>(products, lane);
    halve<D, 2, 4>(products, lane);
  } else {
    halve<D, 4, 16>(products, lane);
    halve<D, 2, 8>(products, lane);
  }
}

// products[query][0..1] of the own tokens with a channel-major page.
template <typename D, int BITS, typename Queries>
inline void multiply_page(const device uchar* keys, const device half* scales, Queries queries, bool active, Place place,
                          thread float* products) {
  constexpr int bytes = KeyRows<D, BITS>::bytes, part = KeyRows<D, BITS>::part;
  const Sharing<D::SHARED> sharing = Sharing<D::SHARED>();
  float offsets[D::QUERIES];
  UNROLL for (int i = 0; i < D::QUERIES; ++i) offsets[i] = 0.0f;
  for (int first = 0; first < D::KEY_DIM; first += part) {
    const int last = min(first + part, D::KEY_DIM);
    auto rows = rows_of<D>(sharing, keys + first * bytes, last - first, bytes, bytes, place);
    if (active) multiply_channels<D, BITS>(rows, scales_of(sharing, scales, place), queries, first, last, place.lane, products, offsets);
  }
  if (!active) return;
  add_channels<D>(products, place.lane);
  UNROLL for (int i = 0; i < D::QUERIES; ++i) {
    const float offset = Element<typename D::T, BITS>::quantized ? simd_sum(offsets[i]) : 0.0f;
    products[i * D::KEY_RUN] += offset;
    products[i * D::KEY_RUN + 1] += offset;
  }
}

// The same with the open page, token-major, of which only `present` tokens are there.
template <typename D, typename Queries>
inline void multiply_open(OpenRows keys, Queries queries, int present, bool active, Place place, thread float* products) {
  typedef typename D::T T;
  constexpr int size = sizeof(T), bytes = 8 * size, stride = D::KEY_DIM * size;
  constexpr int part = D::SHARED ? rows_at_once(D::STAGE, 64 * size, D::KEY_DIM) / 8 * 8 : D::KEY_DIM;
  const int token = own_token<D>(place.lane);
  for (int first = 0; first < D::KEY_DIM; first += part) {
    const int last = min(first + part, D::KEY_DIM);
    auto rows = rows_of<D>(Sharing<D::SHARED>(), part_of(keys, 0, first * size, stride), present, (last - first) * size, stride, place);
    if (!active) continue;
    ROLLED for (int channel = first; channel < last; channel += 8) {
      uint words[2 * bytes / 4];
      UNROLL for (int i = 0; i < 2; ++i) {
        if (token + i < present) {
          load_run<bytes, 16>(rows, token + i, (channel - first) * size, words + i * bytes / 4);
        } else {
          UNROLL for (int j = 0; j < bytes / 4; ++j) words[i * bytes / 4 + j] = 0;
        }
      }
      float sums[2 * D::QUERIES];  // of eight products: added to the others together, so that less is lost
      UNROLL for (int i = 0; i < 2 * D::QUERIES; ++i) sums[i] = 0.0f;
      UNROLL for (int j = 0; j < 8; ++j) {
        const float x = value_at<T, 16>(words, j), y = value_at<T, 16>(words + bytes / 4, j);
        UNROLL for (int i = 0; i < D::QUERIES; ++i) {
          const float q = query_at<D>(queries, i, channel + j);
          sums[2 * i] += q * x;
          sums[2 * i + 1] += q * y;
        }
      }
      UNROLL for (int i = 0; i < D::QUERIES; ++i) {
        products[i * D::KEY_RUN] += sums[2 * i];
        products[i * D::KEY_RUN + 1] += sums[2 * i + 1];
      }
    }
  }
}
