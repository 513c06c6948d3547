// Decode attention: pages read where they lie by one simdgroup, or put together by all of a threadgroup.
#pragma once
#include "paged_attention/decode/work.h"

// Tells the functions below at compile time whether simdgroups share their pages.
template <bool SHARED>
struct Sharing {};

inline void together(Sharing<true>) { threadgroup_barrier(mem_flags::mem_threadgroup); }
inline void together(Sharing<false>) { simdgroup_barrier(mem_flags::mem_threadgroup); }

// `count` rows of `bytes` bytes, `stride` bytes apart: where they are, or as all threads together copy them.
template <typename D>
inline DeviceRows rows_of(Sharing<false>, const device uchar* from, uint count, uint bytes, uint stride, Place place) {
  DeviceRows rows;
  rows.start = from;
  rows.stride = stride;
  return rows;
}

template <typename D>
inline OpenRows rows_of(Sharing<false>, OpenRows from, uint count, uint bytes, uint stride, Place place) {
  return from;
}

// Whether rows lie one after another as in the copy that is made of them.
inline bool is_dense(const device uchar* from, uint bytes, uint stride) { return bytes == stride; }
inline bool is_dense(OpenRows from, uint bytes, uint stride) { return false; }

template <typename D, typename From>
inline StagedRows rows_of(Sharing<true> sharing, From from, uint count, uint bytes, uint stride, Place place) {
  StagedRows rows;
  rows.start = place.stage;
  rows.stride = bytes;
  together(sharing);
  if (is_dense(from, bytes, stride) && count * bytes % 16 == 0) {
    for (uint i = place.index; i < count * bytes / 16; i += 32 * D::SIMDGROUPS) {
      const uint4 x = ((const device uint4*)row_of(from, 0, stride))[i];
      place.stage[4 * i] = x.x;
      place.stage[4 * i + 1] = x.y;
      place.stage[4 * i + 2] = x.z;
      place.stage[4 * i + 3] = x.w;
    }
  } else {
    const uint words = bytes / 4;
    for (uint i = place.index; i < count * words; i += 32 * D::SIMDGROUPS) {
      place.stage[i] = ((const device uint*)row_of(from, i / words, stride))[i % words];
    }
  }
  together(sharing);
  return rows;
}

// Scales and biases of K: lanes read each of them once where they are, or all threads have copied them.
inline const device half* scales_of(Sharing<false>, const device half* scales, Place place) { return scales; }
inline const threadgroup half* scales_of(Sharing<true>, const device half* scales, Place place) {
  return (const threadgroup half*)place.key_scales;
}

// Copies what a page's codes mean: K's scales for all simdgroups that share the page, V's for whoever works on the page.
template <typename D>
inline void copy_scales(const device half* keys, const device half* values, Place place) {
  const uint first = D::SHARED ? place.index : place.lane, step = D::SHARED ? 32 * D::SIMDGROUPS : 32;
  if (D::SHARED && D::K_BITS != 16) {
    for (uint i = first; i < uint(D::KEY_DIM); i += step) place.key_scales[i] = ((const device uint*)keys)[i];
  }
  if (D::V_BITS != 16) {
    for (uint i = first; i < uint(64 * D::GROUPS); i += step) place.value_scales[i] = ((const device uint*)values)[i];
  }
}
