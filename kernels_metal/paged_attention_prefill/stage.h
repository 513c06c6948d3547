// Keys and values of up to 64 tokens of one page and KV head, brought from device memory into a tile of threadgroup memory:
// token-major, values of T, `LINE` values from one token to the next. Codes are taken apart here, once for all rows of the tile.
#pragma once
#include "include/codes.h"

// How many neighbouring values a thread takes: enough to fill words of 32 bits, where a group of `GROUP` values allows it.
template <int BITS, int GROUP>
struct Run {
  static constexpr constant int wanted = BITS == 3 || BITS == 5 ? 32 : BITS == 6 || BITS == 2 ? 16 : 8;
  static constexpr constant int value = GROUP % wanted == 0 ? wanted : 8;
};

// Bytes from one channel (keys) or token (values) to the next.
template <typename T, int BITS, int COUNT>
struct RowBytes {
  static constexpr constant int value = BITS == 16 ? COUNT * int(sizeof(T)) : (COUNT * BITS + 31) / 32 * 4;
};

// A page of one KV head in one of the pools, or the whole pool. Scales are not read where the values are kept in T.
struct Page {
  const device uchar* keys;
  const device half* key_scales;
  const device uchar* values;
  const device half* value_scales;
};

template <typename T, int DK, int DV, int K_BITS, int V_BITS, int GROUP>
inline Page page_at(Page pool, ulong index) {
  Page page;
  page.keys = pool.keys + index * (DK * RowBytes<T, K_BITS, 64>::value);
  page.key_scales = pool.key_scales + index * (2 * DK);
  page.values = pool.values + index * (64 * RowBytes<T, V_BITS, DV>::value);
  page.value_scales = pool.value_scales + index * (2 * 64 * (DV / GROUP));
  return page;
}

// KEYS tokens from `first` on. Neighbouring threads take neighbouring channels, so that what they write does not collide.
template <typename T, int BITS, int DIM, int KEYS, int LINE>
inline void stage_keys(threadgroup T* tile, Page page, uint first, uint index, uint threads) {
  constexpr int RUN = Run<BITS, KEYS>::value;
  constexpr int BYTES = RUN * Element<T, BITS>::bits / 8;
  constexpr int STRIDE = RowBytes<T, BITS, 64>::value;
  DeviceRows rows;
  rows.start = page.keys;
  rows.stride = STRIDE;
  for (uint item = index; item < uint(DIM * (KEYS / RUN)); item += threads) {
    const uint channel = item % DIM, token = item / DIM * RUN;
    uint words[(BYTES + 3) / 4];
    load_run<BYTES, LoadWidth<BYTES, STRIDE>::value>(rows, channel, (first + token) * Element<T, BITS>::bits / 8, words);
    const float scale = Element<T, BITS>::quantized ? float(page.key_scales[channel]) : 1.0f;
    const float bias = Element<T, BITS>::quantized ? float(page.key_scales[DIM + channel]) : 0.0f;
#pragma clang loop unroll(full)
    for (int i = 0; i < RUN; ++i) tile[(token + i) * LINE + channel] = static_cast<T>(bias + scale * value_at<T, BITS>(words, i));
  }
}

template <typename T, int BITS, int DIM, int GROUP, int KEYS, int LINE>
inline void stage_values(threadgroup T* tile, Page page, uint first, uint index, uint threads) {
  constexpr int RUN = Run<BITS, GROUP>::value;
  constexpr int BYTES = RUN * Element<T, BITS>::bits / 8;
  constexpr int STRIDE = RowBytes<T, BITS, DIM>::value;
  DeviceRows rows;
  rows.start = page.values;
  rows.stride = STRIDE;
  for (uint item = index; item < uint(KEYS * (DIM / RUN)); item += threads) {
    const uint token = item / (DIM / RUN), channel = item % (DIM / RUN) * RUN;
    uint words[(BYTES + 3) / 4];
    load_run<BYTES, LoadWidth<BYTES, STRIDE>::value>(rows, first + token, channel * Element<T, BITS>::bits / 8, words);
    const uint group = (first + token) * (DIM / GROUP) + channel / GROUP;
    const float scale = Element<T, BITS>::quantized ? float(page.value_scales[group]) : 1.0f;
    const float bias = Element<T, BITS>::quantized ? float(page.value_scales[64 * (DIM / GROUP) + group]) : 0.0f;
#pragma clang loop unroll(full)
    for (int i = 0; i < RUN; ++i) tile[token * LINE + channel + i] = static_cast<T>(bias + scale * value_at<T, BITS>(words, i));
  }
}

// Raw keys or values: tokens below `past` lie in the open page, later ones among the step's rows, `stride` values apart, of which `fresh`
// would be that of position 0. Tokens behind `last` do not exist yet and become zeros.
template <typename T, int DIM, int KEYS, int LINE>
inline void stage_raw(
    threadgroup T* tile, const device T* open, const device T* fresh, int stride, int first, int past, int last, uint index, uint threads) {
  for (uint item = index; item < uint(KEYS * (DIM / 8)); item += threads) {
    const int token = int(item / (DIM / 8)), channel = int(item % (DIM / 8)) * 8, position = first + token;
    const device T* from = position < past ? open + position % 64 * DIM : fresh + long(position) * stride;
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; ++i) tile[token * LINE + channel + i] = position <= last ? from[channel + i] : T(0);
  }
}
