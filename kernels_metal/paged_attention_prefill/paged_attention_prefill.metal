// Attention of many query rows to the pages of their sequences.
//
// A threadgroup answers one tile: up to 8 * BLOCKS neighbouring rows of one sequence, all in the same page, for HEADS query heads of one
// KV head. Each simdgroup holds the queries of 8 rows and one head; all of them read the same keys and values, which are brought into
// threadgroup memory KEYS tokens at a time and taken apart once for everybody: first the keys, then the values in the same place.
//
//   scores  [8 rows, KEYS]      8x8 matrices in registers, products of T summed in float32
//   answer  [8 rows, CHANNELS]  8x8 matrices in registers, float32; SPLITS simdgroups share the channels of a head too wide for one,
//                               and each of them computes the scores
//
// Earlier pages are read in their sealed form, the rows' own page raw. No score leaves the registers. Queries are read from device
// memory again for every KEYS tokens: 16 bytes of a row at a time, which caches hold, and one load for KEYS / 8 products of matrices.
#include "include/codes.h"
#include "include/fragments.h"
#include "include/softmax.h"
#include "paged_attention_prefill/stage.h"

// Id of a page to be read raw, as the queries' own page always is.
constant constexpr int kRaw = -2147483647 - 1;

// What is known when the kernel is compiled. Names as in the launcher.
template <typename T_, int KEY_DIM_, int VALUE_DIM_, int K_BITS_, int V_BITS_, int GROUP_, int GROUP_HEADS_, int HEADS_, int BLOCKS_, int SPLITS_, int KEYS_>
struct Prefill {
  typedef T_ T;
  typedef simdgroup_matrix<T_, 8, 8> Matrix;
  typedef simdgroup_matrix<float, 8, 8> Sums;
  static constexpr constant int KEY_DIM = KEY_DIM_, VALUE_DIM = VALUE_DIM_;
  static constexpr constant int K_BITS = K_BITS_, V_BITS = V_BITS_;
  static constexpr constant int GROUP = V_BITS_ == 16 ? VALUE_DIM_ : GROUP_;
  static constexpr constant int PARTS = GROUP_HEADS_ / HEADS_;  // of a KV head's query heads
  static constexpr constant int HEADS = HEADS_, SPLITS = SPLITS_, KEYS = KEYS_;
  static constexpr constant int CHANNELS = (VALUE_DIM_ / 8 + SPLITS_ - 1) / SPLITS_ * 8;  // the last split may have fewer
  static constexpr constant int KEY_LINE = KEY_DIM_ + 8, VALUE_LINE = VALUE_DIM_ + 8;  // eight more, against collisions of banks
  static constexpr constant int LINE = KEY_LINE > VALUE_LINE ? KEY_LINE : VALUE_LINE;
  static constexpr constant int THREADS = 32 * HEADS_ * BLOCKS_ * SPLITS_;
};

// What a tile is: `tiles` has eight numbers for each.
struct Tile {
  int row;       // of the step, the tile's first
  int rows;
  int position;  // of that row in its sequence
  int past;      // tokens of the sequence before this step
  int slot;      // of its open page
  int table;     // where the table has page 0 of the sequence; pages that nobody sees any more are not there
  int answer;    // row of the output for the tile's first
  int window;    // how many tokens a query sees, itself included
};

inline Tile tile_at(const device int* tiles, uint index) {
  const device int* t = tiles + 8 * index;
  return Tile{t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]};
}

// Which part of a tile a simdgroup has: rows `row ..`, of which `rows` exist (none if that is not above zero), of one query head.
struct Place {
  uint lane, index;
  int kv_head, head, row, rows, split;
};

template <typename P>
inline Place place_of(Tile tile, uint part, uint simdgroup_index, uint lane) {
  const int block = int(simdgroup_index) / P::SPLITS;
  Place place;
  place.lane = lane;
  place.index = simdgroup_index * 32 + lane;
  place.kv_head = int(part) / P::PARTS;
  place.head = int(part) * P::HEADS + block % P::HEADS;
  place.row = block / P::HEADS * 8;
  place.rows = tile.rows - place.row;
  place.split = int(simdgroup_index) % P::SPLITS;
  return place;
}

// Everything that does not change from tile to tile.
template <typename T>
struct Operands {
  const device T* queries;     // [rows, heads, KEY_DIM]
  const device T* new_keys;    // [rows, kv_heads, KEY_DIM], the step's own
  const device T* new_values;  // [rows, kv_heads, VALUE_DIM]
  const device T* open_keys;   // [slots, kv_heads, 64, KEY_DIM], as before the step or after it, if that has filled no page
  const device T* open_values;
  Page sealed;  // [kv_heads, sealed_pages, ...]
  Page filled;  // [kv_heads, filled_pages, ...], what this step has sealed
  Page first;   // [kv_heads, first_pages, ...], at 16 bits
  const device int* table;
  int heads, kv_heads, sealed_pages, filled_pages, first_pages;
  float scale, softcap;
};

// A logit that takes part in the softmax and has no value. Sums of weights are added up over lanes, so that one lane of a row has it.
inline void add_sink(thread OnlineSoftmax& softmax, float sink, uint lane) {
  softmax.maximum = sink;
  softmax.sum = fragment_column(lane) == 0 ? 1.0f : 0.0f;
}

template <typename P, bool OF_KEYS>
inline void stage_own(threadgroup typename P::T* room, thread const Operands<typename P::T>& x, Tile tile, Place place, int first) {
  constexpr int DIM = OF_KEYS ? P::KEY_DIM : P::VALUE_DIM;
  const int stride = x.kv_heads * DIM;
  const device typename P::T* open = (OF_KEYS ? x.open_keys : x.open_values) + ulong(tile.slot * x.kv_heads + place.kv_head) * (64 * DIM);
  const device typename P::T* fresh = (OF_KEYS ? x.new_keys : x.new_values) + long(tile.row - tile.position) * stride + place.kv_head * DIM;
  const int last = tile.position + tile.rows - 1;
  stage_raw<typename P::T, DIM, P::KEYS, DIM + 8>(room, open, fresh, stride, first, tile.past, last, place.index, P::THREADS);
}

template <typename P, int K_BITS, int V_BITS, int GROUP, bool OF_KEYS>
inline void stage_page(threadgroup typename P::T* room, Page pool, ulong number, Place place, int first) {
  const Page page = page_at<typename P::T, P::KEY_DIM, P::VALUE_DIM, K_BITS, V_BITS, GROUP>(pool, number);
  const uint offset = uint(first % 64);
  if (OF_KEYS) {
    stage_keys<typename P::T, K_BITS, P::KEY_DIM, P::KEYS, P::KEY_LINE>(room, page, offset, place.index, P::THREADS);
  } else {
    stage_values<typename P::T, V_BITS, P::VALUE_DIM, GROUP, P::KEYS, P::VALUE_LINE>(room, page, offset, place.index, P::THREADS);
  }
}

// Brings KEYS tokens from `first` on into threadgroup memory: of keys, or of values.
template <typename P, bool OF_KEYS>
inline void stage(threadgroup typename P::T* room, thread const Operands<typename P::T>& x, Tile tile, Place place, int first) {
  const int number = first / 64;
  const int id = number == tile.position / 64 ? kRaw : x.table[tile.table + number];
  const ulong head = ulong(place.kv_head);
  if (id == kRaw) {
    stage_own<P, OF_KEYS>(room, x, tile, place, first);
  } else if (id < 0) {
    stage_page<P, 16, 16, P::VALUE_DIM, OF_KEYS>(room, x.first, head * x.first_pages + ulong(~id), place, first);
  } else {
    const bool fresh = id >= x.sealed_pages;
    Page pool = x.sealed;
    if (fresh) pool = x.filled;
    const ulong page = fresh ? head * x.filled_pages + ulong(id - x.sealed_pages) : head * x.sealed_pages + ulong(id);
    stage_page<P, P::K_BITS, P::V_BITS, P::GROUP, OF_KEYS>(room, pool, page, place, first);
  }
}

// Eight channels of the simdgroup's queries; rows that do not exist are zeros.
template <typename T>
inline simdgroup_matrix<T, 8, 8> queries_of(const device T* queries, int stride, int rows, uint lane) {
  const int row = int(fragment_row(lane));
  const device T* from = queries + row * stride + int(fragment_column(lane));
  simdgroup_matrix<T, 8, 8> m;
  m.thread_elements()[0] = row < rows ? from[0] : T(0);
  m.thread_elements()[1] = row < rows ? from[1] : T(0);
  return m;
}

// Queries times the keys in the room, transposed.
template <typename P>
inline void multiply_keys(
    const threadgroup typename P::T* keys, thread const Operands<typename P::T>& x, Tile tile, Place place, thread typename P::Sums* scores) {
  const int stride = x.heads * P::KEY_DIM;
  const device typename P::T* queries = x.queries + long(tile.row + place.row) * stride + place.head * P::KEY_DIM;
#pragma clang loop unroll(full)
  for (int n = 0; n < P::KEYS / 8; ++n) scores[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int channel = 0; channel < P::KEY_DIM; channel += 8) {
    const typename P::Matrix left = queries_of(queries + channel, stride, place.rows, place.lane);
#pragma clang loop unroll(full)
    for (int n = 0; n < P::KEYS / 8; ++n) {
      typename P::Matrix right;
      simdgroup_load(right, keys + 8 * n * P::KEY_LINE + channel, P::KEY_LINE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(scores[n], left, right, scores[n]);
    }
  }
}

// Scores become weights, in place; returns what the answer so far has to be multiplied by.
template <typename P>
inline float weigh(
    Tile tile, Place place, int first, float scale, float softcap, thread typename P::Sums* scores, thread OnlineSoftmax& softmax) {
  // How far behind its query the lane's first key lies.
  const int distance = tile.position + place.row + int(fragment_row(place.lane)) - first - int(fragment_column(place.lane));
  float highest = kNothing;
#pragma clang loop unroll(full)
  for (int i = 0; i < P::KEYS / 4; ++i) {
    const int behind = distance - i / 2 * 8 - i % 2;
    const float score = score_of(scores[i / 2].thread_elements()[i % 2], scale, softcap);
    scores[i / 2].thread_elements()[i % 2] = score;
    if (behind >= 0 && behind < tile.window) highest = max(highest, score);
  }
  const float shrink = raise_maximum(softmax, row_maximum(highest));
#pragma clang loop unroll(full)
  for (int i = 0; i < P::KEYS / 4; ++i) {
    const int behind = distance - i / 2 * 8 - i % 2;
    const float score = scores[i / 2].thread_elements()[i % 2];
    scores[i / 2].thread_elements()[i % 2] = weight_of(softmax, score, behind >= 0 && behind < tile.window);
  }
  return shrink;
}

// Whether a split has this matrix of the answer: always, where heads can be divided evenly.
template <typename P>
inline bool has_channels(Place place, int channel) {
  return P::VALUE_DIM % P::CHANNELS == 0 || place.split * P::CHANNELS + channel < P::VALUE_DIM;
}

// What is added up so far, shrunk, and the weights times the values in the room.
template <typename P>
inline void multiply_values(
    const threadgroup typename P::T* values, Place place, float shrink, thread typename P::Sums* scores, thread typename P::Sums* sums) {
#pragma clang loop unroll(full)
  for (int d = 0; d < P::CHANNELS / 8; ++d) {
    if (!has_channels<P>(place, 8 * d)) continue;
    sums[d].thread_elements()[0] *= shrink;
    sums[d].thread_elements()[1] *= shrink;
#pragma clang loop unroll(full)
    for (int n = 0; n < P::KEYS / 8; ++n) {
      typename P::Matrix right;
      simdgroup_load(right, values + 8 * n * P::VALUE_LINE + place.split * P::CHANNELS + 8 * d, P::VALUE_LINE);
      simdgroup_multiply_accumulate(sums[d], scores[n], right, sums[d]);
    }
  }
}

template <typename P>
inline void store(Tile tile, Place place, int heads, thread typename P::Sums* sums, float lane_sum, device typename P::T* out) {
  const float sum = row_sum(lane_sum);
  const int row = int(fragment_row(place.lane));
  if (row >= place.rows) return;
  const int channel = place.split * P::CHANNELS + int(fragment_column(place.lane));
  device typename P::T* to = out + (long(tile.answer + place.row + row) * heads + place.head) * P::VALUE_DIM + channel;
#pragma clang loop unroll(full)
  for (int d = 0; d < P::CHANNELS / 8; ++d) {
    if (!has_channels<P>(place, 8 * d)) continue;
    to[8 * d] = static_cast<typename P::T>(sums[d].thread_elements()[0] / sum);
    to[8 * d + 1] = static_cast<typename P::T>(sums[d].thread_elements()[1] / sum);
  }
}

// `sums` [CHANNELS / 8] is the answer so far of a simdgroup's 8 rows.
template <typename P>
inline void attend(
    threadgroup typename P::T* room,
    thread const Operands<typename P::T>& x,
    Tile tile,
    Place place,
    thread typename P::Sums* sums,
    thread OnlineSoftmax& softmax) {
  typename P::Sums scores[P::KEYS / 8];
  const int oldest = max(tile.position - tile.window + 1, 0);
  for (int first = oldest / P::KEYS * P::KEYS; first < tile.position + tile.rows; first += P::KEYS) {
    stage<P, true>(room, x, tile, place, first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float shrink = 1.0f;
    if (place.rows > 0) {
      multiply_keys<P>(room, x, tile, place, scores);
      shrink = weigh<P>(tile, place, first, x.scale, x.softcap, scores, softmax);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<P, false>(room, x, tile, place, first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (place.rows > 0) multiply_values<P>(room, place, shrink, scores, sums);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

//: kernel paged_attention_prefill(queries, new_keys, new_values, open_keys, open_values, sealed_keys, key_scales, sealed_values,
//:                                value_scales, filled_keys, filled_key_scales, filled_values, filled_value_scales, first_keys,
//:                                first_values, table, tiles, settings, sinks) -> out
//: threads (32 * HEADS * BLOCKS * SPLITS * tiles, heads / HEADS, 1), groups of (32 * HEADS * BLOCKS * SPLITS, 1, 1)
typedef Prefill<T, KEY_DIM, VALUE_DIM, K_BITS, V_BITS, GROUP, GROUP_HEADS, HEADS, BLOCKS, SPLITS, KEYS> P;
threadgroup T room[P::KEYS * P::LINE];

Operands<T> x;
x.queries = queries;
x.new_keys = new_keys;
x.new_values = new_values;
x.open_keys = open_keys;
x.open_values = open_values;
x.sealed = Page{(const device uchar*)sealed_keys, key_scales, (const device uchar*)sealed_values, value_scales};
x.filled = Page{(const device uchar*)filled_keys, filled_key_scales, (const device uchar*)filled_values, filled_value_scales};
x.first = Page{(const device uchar*)first_keys, key_scales, (const device uchar*)first_values, value_scales};
x.table = table;
x.heads = queries_shape[1];
x.kv_heads = new_keys_shape[1];
x.sealed_pages = sealed_keys_shape[1];
x.filled_pages = filled_keys_shape[1];
x.first_pages = first_keys_shape[1];
x.scale = settings[0];
x.softcap = settings[1];

const Tile tile = tile_at(tiles, threadgroup_position_in_grid.x);
const Place place = place_of<P>(tile, threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
// Matrices stay in local arrays: in Metal 4.1 a struct of them has no default constructor.
typename P::Sums sums[P::CHANNELS / 8];
#pragma clang loop unroll(full)
for (int d = 0; d < P::CHANNELS / 8; ++d) sums[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
OnlineSoftmax softmax = empty_softmax();
if (settings[2] != 0.0f) add_sink(softmax, float(sinks[place.head]), place.lane);
attend<P>(room, x, tile, place, sums, softmax);
if (place.rows > 0) store<P>(tile, place, x.heads, sums, softmax.sum, out);
