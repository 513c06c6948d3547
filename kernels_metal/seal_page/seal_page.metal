// Full pages of raw keys and values to the form in which the pool keeps them. README.md has layout and rounding.
//
// A thread quantizes whole rows (a channel of K, a token of V), so that nobody else writes to their words. Everything is
// computed in float32 in a fixed order: every implementation of the quantizer gives the same codes.
#include "include/codes.h"

// What the codes of a group mean: value = bias + scale * code.
struct Meaning {
  half scale;
  half bias;
};

// Halves below 2^-14 are made as integers: whether converting to them gives zero is up to the GPU. They are multiples of 2^-24.
inline bool is_subnormal(float x) { return fabs(x) < 6.103515625e-5f; }
inline half subnormal(float steps, bool negative) { return as_type<half>(ushort(uint(fabs(steps)) | (negative ? 0x8000u : 0u))); }

// The largest half that is not above x, and the smallest that is not below a positive x; |x| is at most 65504.
inline half half_below(float x) {
  if (is_subnormal(x)) return subnormal(floor(x * 16777216.0f), x < 0.0f);
  const half nearest = half(x);
  if (float(nearest) <= x) return nearest;
  const ushort bits = as_type<ushort>(nearest);
  return as_type<half>(ushort(bits < 0x8000 ? bits - 1 : bits + 1));
}

inline half half_above(float x) {
  if (is_subnormal(x)) return subnormal(ceil(x * 16777216.0f), false);
  const half nearest = half(x);
  return float(nearest) >= x ? nearest : as_type<half>(ushort(as_type<ushort>(nearest) + 1));
}

// Of a group between `lowest` and `highest`. Codes stay away from both ends by `inset` of the range, a power of two. The floor of the
// scale lets a constant group come back exactly.
template <int BITS>
inline Meaning meaning_of(float lowest, float highest, float inset) {
  constexpr float levels = float((1 << BITS) - 1);
  Meaning m;
  const float least = clamp(lowest, -65504.0f, 65504.0f), most = clamp(highest, -65504.0f, 65504.0f);
  const float margin = (most - least) * inset;
  m.bias = half_below(least + margin);
  const float wanted = max((most - margin - float(m.bias)) / levels, 5.9604644775390625e-8f);
  m.scale = half_above(min(wanted, 65504.0f));
  return m;
}

// The nearest code, ties to even. What is not a number becomes code 0.
template <int BITS>
inline uint code_of(float x, Meaning m) {
  constexpr uint levels = (1u << BITS) - 1u;
  const float code = rint((x - float(m.bias)) / float(m.scale));
  return code > 0.0f ? (code < float(levels) ? uint(code) : levels) : 0u;
}

// Appends codes to a row of words. Between two calls, `pending` holds the `filled` low bits of the word to come.
template <int BITS>
struct RowWriter {
  device uint* word;
  uint pending;
  int filled;
};

template <int BITS>
inline void append(thread RowWriter<BITS>& row, uint code) {
  row.pending |= code << row.filled;
  row.filled += BITS;
  if (row.filled < 32) return;
  *row.word = row.pending;
  row.word += 1;
  row.filled -= 32;
  row.pending = row.filled > 0 ? code >> (BITS - row.filled) : 0u;
}

template <int BITS>
inline void finish(thread RowWriter<BITS>& row) {
  if (row.filled > 0) *row.word = row.pending;
}

// SIZE values, `stride` apart, read once.
template <typename T, int BITS, int SIZE>
inline Meaning seal_group(const device T* from, int stride, float inset, thread RowWriter<BITS>& row) {
  float values[SIZE];
  float lowest = INFINITY, highest = -INFINITY;
  UNROLL for (int i = 0; i < SIZE; ++i) {
    values[i] = float(from[i * stride]);
    lowest = min(lowest, values[i]);
    highest = max(highest, values[i]);
  }
  const Meaning m = meaning_of<BITS>(lowest, highest, inset);
  UNROLL for (int i = 0; i < SIZE; ++i) append(row, code_of<BITS>(values[i], m));
  return m;
}

//: kernel seal_keys(pages) -> codes, scales
//: threads (channels rounded up to 32, pages, KV heads), groups of (32, 1, 1). A thread seals a channel of a page.
const int channel = thread_position_in_grid.x;
if (channel < DIM) {
  const size_t page = size_t(threadgroup_position_in_grid.z) * threadgroups_per_grid.y + threadgroup_position_in_grid.y;
  RowWriter<BITS> row;
  row.word = codes + (page * DIM + channel) * (2 * BITS);
  row.pending = 0;
  row.filled = 0;
  const Meaning m = seal_group<T, BITS, 64>(pages + page * 64 * DIM + channel, DIM, 0.0f, row);
  finish(row);
  scales[page * 2 * DIM + channel] = m.scale;
  scales[page * 2 * DIM + DIM + channel] = m.bias;
}

//: kernel seal_values(pages) -> codes, scales
//: threads (64 tokens, pages, KV heads), groups of (32, 1, 1). A thread seals a token of a page.
constexpr int groups = DIM / GROUP, words = (DIM * BITS + 31) / 32;
constexpr float inset = 0.25f / float(1 << BITS);
const int token = thread_position_in_grid.x;
const size_t page = size_t(threadgroup_position_in_grid.z) * threadgroups_per_grid.y + threadgroup_position_in_grid.y;
RowWriter<BITS> row;
row.word = codes + (page * 64 + token) * words;
row.pending = 0;
row.filled = 0;
for (int group = 0; group < groups; ++group) {
  const Meaning m = seal_group<T, BITS, GROUP>(pages + (page * 64 + token) * DIM + group * GROUP, 1, inset, row);
  scales[(page * 128 + token) * groups + group] = m.scale;
  scales[(page * 128 + 64 + token) * groups + group] = m.bias;
}
finish(row);
