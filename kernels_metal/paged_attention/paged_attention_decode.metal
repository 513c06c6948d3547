// Attention of 1 to 8 query rows per sequence to the pages of its cache. README.md has the tile, the maths and the bytes.
//
// A threadgroup computes one work item (`Item`, made by plan.py) for one KV head: a run of pages of one sequence, for all query
// heads of that KV head and all rows of the sequence. A query is one pair of row and head: query i of an item is head i % HEADS
// of row i / HEADS. A simdgroup holds the answers of QUERIES queries in registers.
//   SHARED = false: those are all. Every simdgroup takes pages of its own, straight from device memory, and the answers of the
//                   simdgroups are merged at the end.
//   SHARED = true:  there are more. All simdgroups work on the same page, each for queries of its own, and read it from
//                   threadgroup memory, where they have put it together, part by part: it still leaves device memory once.
#include "include/codes.h"
#include "include/softmax.h"

// What is known when the kernel is compiled.
template <typename T_, int K_BITS_, int V_BITS_, int KEY_DIM_, int VALUE_DIM_, int GROUP_, int HEADS_, int QUERIES_, int KEY_RUN_,
          int VALUE_RUN_, int SIMDGROUPS_, bool SHARED_, int STAGE_>
struct Decode {
  typedef T_ T;
  static constexpr constant int K_BITS = K_BITS_, V_BITS = V_BITS_, KEY_DIM = KEY_DIM_, VALUE_DIM = VALUE_DIM_;
  static constexpr constant int HEADS = HEADS_, QUERIES = QUERIES_, SIMDGROUPS = SIMDGROUPS_, STAGE = STAGE_;
  static constexpr constant bool SHARED = SHARED_;
  // Keys: KEY_LANES lanes read a channel's row of 64 tokens, KEY_RUN tokens each; a simdgroup reads KEY_ROWS channels at a time.
  static constexpr constant int KEY_RUN = KEY_RUN_, KEY_LANES = 64 / KEY_RUN_, KEY_ROWS = KEY_RUN_ / 2;
  // Values: VALUE_LANES lanes read a token's row, VALUE_RUN channels each, and RUNS times where the head is wide.
  static constexpr constant int VALUE_RUN = VALUE_RUN_, PARTS = VALUE_DIM_ / VALUE_RUN_;
  static constexpr constant int VALUE_LANES = PARTS > 16 ? 32 : PARTS > 8 ? 16 : PARTS > 4 ? 8 : PARTS > 2 ? 4 : PARTS > 1 ? 2 : 1;
  static constexpr constant int VALUE_ROWS = 32 / VALUE_LANES, RUNS = (PARTS + VALUE_LANES - 1) / VALUE_LANES;
  // Channels of V that share a scale and a bias. Where V is kept as it is, one group stands for none.
  static constexpr constant int GROUP = V_BITS_ == 16 ? VALUE_DIM_ : GROUP_, GROUPS = VALUE_DIM_ / GROUP;
};

// How many rows of `bytes` fit into `stage` bytes: a power of two, or all `rows` of the page.
constexpr int rows_at_once(int stage, int bytes, int rows) {
  const int fit = stage / bytes;
  return fit >= rows ? rows : fit >= 256 ? 256 : fit >= 128 ? 128 : fit >= 64 ? 64 : fit >= 32 ? 32 : fit >= 16 ? 16 : fit >= 8 ? 8 : 4;
}

// Rows of a page, and how many of them are worked on at once (all, unless simdgroups share them).
template <typename D, int BITS>
struct KeyRows {
  static constexpr constant int bytes = 8 * Element<typename D::T, BITS>::bits;
  static constexpr constant int part = D::SHARED ? rows_at_once(D::STAGE, bytes, D::KEY_DIM) : D::KEY_DIM;
};

template <typename D, int BITS>
struct ValueRows {
  static constexpr constant int bytes = (D::VALUE_DIM * Element<typename D::T, BITS>::bits + 31) / 32 * 4;
  static constexpr constant int part = D::SHARED ? rows_at_once(D::STAGE, bytes, 64) : 64;
};

// The tokens whose weights lie in threadgroup memory at once.
template <typename D>
struct WeightRows {
  static constexpr constant int sealed = ValueRows<D, D::V_BITS>::part, plain = ValueRows<D, 16>::part;
  static constexpr constant int part = sealed > plain ? sealed : plain;
};

// A run of pages of one sequence.
struct Item {
  int slot;    // of the open page
  int row;     // of the first query row
  int count;   // of query rows
  int past;    // position of the first row
  int oldest;  // first position that the first row sees; each further row begins one position later
  int begin, end;  // pages; the page of the rows themselves is the open one
  int table;   // where page 0 would be in the table
  int out;     // row of the first answer
};

inline Item item_at(const device int* work, uint index) {
  const device int* at = work + index * 9;
  Item item;
  item.slot = at[0];
  item.row = at[1];
  item.count = at[2];
  item.past = at[3];
  item.oldest = at[4];
  item.begin = at[5];
  item.end = at[6];
  item.table = at[7];
  item.out = at[8];
  return item;
}

// The cache of one KV head: the bytes of its pages, one page behind another.
template <typename T>
struct Pages {
  const device uchar* keys;
  const device half* key_scales;
  const device uchar* values;
  const device half* value_scales;
  const device uchar* first_keys;
  const device uchar* first_values;
  const device uchar* open_keys;
  const device uchar* open_values;
};

// Who this thread is, and its threadgroup's memory.
struct Place {
  uint lane, simdgroup, index;
  threadgroup uint* stage;          // shared: a part of a page
  threadgroup uint* key_scales;     // shared: of the page
  threadgroup uint* value_scales;   // of this simdgroup's page
  threadgroup float* weights;       // of this simdgroup's queries, [token][query]
};

// What a simdgroup knows of its queries after some pages.
template <typename D>
struct State {
  OnlineSoftmax softmax[D::QUERIES];
  float answers[D::QUERIES * D::RUNS * D::VALUE_RUN];  // a lane's channels, from the tokens that it has read
  float biases[D::QUERIES * D::GROUPS];                // sum of weight * bias of V, from the tokens whose weights the lane makes
};

// Queries in threadgroup memory, [query][channel], or, where there is no room, in device memory.
template <typename T>
struct StagedQueries {
  const threadgroup T* start;  // of this simdgroup's first query
  int last;                    // the last query that there is, counted from there
};

template <typename T>
struct DeviceQueries {
  const device T* start;  // of the first row and the first head
  uint row;               // elements from row to row
  int first, last;        // this simdgroup's first query, and the last that there is
};

// Queries of a tile beyond the last one are computed as if they were the last, and not stored.

template <typename D>
inline float query_at(StagedQueries<typename D::T> queries, int query, int channel) {
  return float(queries.start[min(query, queries.last) * D::KEY_DIM + channel]);
}

template <typename D>
inline float query_at(DeviceQueries<typename D::T> queries, int query, int channel) {
  const int i = min(queries.first + query, queries.last);
  return float(queries.start[uint(i / D::HEADS) * queries.row + uint(i % D::HEADS * D::KEY_DIM + channel)]);
}

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
inline StagedRows rows_of(Sharing<true> sharing, const device uchar* from, uint count, uint bytes, uint stride, Place place) {
  StagedRows rows;
  rows.start = place.stage;
  rows.stride = bytes;
  together(sharing);
  if (bytes == stride && count * bytes % 16 == 0) {
    for (uint i = place.index; i < count * bytes / 16; i += 32 * D::SIMDGROUPS) {
      const uint4 x = ((const device uint4*)from)[i];
      place.stage[4 * i] = x.x;
      place.stage[4 * i + 1] = x.y;
      place.stage[4 * i + 2] = x.z;
      place.stage[4 * i + 3] = x.w;
    }
  } else {
    const uint words = bytes / 4;
    for (uint i = place.index; i < count * words; i += 32 * D::SIMDGROUPS) {
      place.stage[i] = ((const device uint*)(from + i / words * stride))[i % words];
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
  for (int block = first; block < last; block += 32) {
    const int own = block + int(lane);
    const bool there = own < last;
    const float scale = there && E::quantized ? float(scales[own]) : 1.0f;
    const float bias = there && E::quantized ? middle_of<BITS>(scale, float(scales[D::KEY_DIM + own])) : 0.0f;
    float scaled[D::QUERIES];
    for (int i = 0; i < D::QUERIES; ++i) {
      const float x = there ? query_at<D>(queries, i, own) : 0.0f;
      scaled[i] = x * scale;
      offsets[i] += x * bias;
    }
    for (int some = 0; some < steps && block + some * D::KEY_ROWS < last; some += ahead) {
      uint codes[ahead * words];
      for (int step = 0; step < ahead; ++step) {
        const int channel = block + (some + step) * D::KEY_ROWS + row;
        for (int i = 0; i < words; ++i) codes[step * words + i] = 0;
        if (channel < last) {
          load_run<bytes, LoadWidth<bytes, 8 * E::bits>::value>(rows, channel - first, part * bytes, codes + step * words);
        }
      }
      for (int step = 0; step < ahead; ++step) {
        for (int i = 0; i < D::QUERIES; ++i) {
          const float x = simd_shuffle(scaled[i], ushort((some + step) * D::KEY_ROWS + row));
          for (int j = 0; j < D::KEY_RUN; ++j) {
            products[i * D::KEY_RUN + j] += x * centred_value_at<typename D::T, BITS>(codes + step * words, j);
          }
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

// Adds up the products of the lanes that have read different channels of the same tokens. In each step, two lanes halve what
// they have: each keeps half of the tokens and gives the other half away. products[query][0..1] are then the own tokens'.
template <typename D>
inline void add_channels(thread float* products, uint lane) {
  for (int half_run = D::KEY_RUN / 2, mask = 16; half_run >= 2; half_run /= 2, mask /= 2) {
    const bool upper = (lane & uint(mask)) != 0;
    for (int i = 0; i < D::QUERIES; ++i) {
      thread float* x = products + i * D::KEY_RUN;
      for (int j = 0; j < half_run; ++j) {
        const float kept = upper ? x[half_run + j] : x[j];
        const float given = upper ? x[j] : x[half_run + j];
        x[j] = kept + simd_shuffle_xor(given, ushort(mask));
      }
    }
  }
}

// products[query][0..1] of the own tokens with a channel-major page.
template <typename D, int BITS, typename Queries>
inline void multiply_page(const device uchar* keys, const device half* scales, Queries queries, bool active, Place place,
                          thread float* products) {
  constexpr int bytes = KeyRows<D, BITS>::bytes, part = KeyRows<D, BITS>::part;
  const Sharing<D::SHARED> sharing = Sharing<D::SHARED>();
  float offsets[D::QUERIES];
  for (int i = 0; i < D::QUERIES; ++i) offsets[i] = 0.0f;
  for (int first = 0; first < D::KEY_DIM; first += part) {
    const int last = min(first + part, D::KEY_DIM);
    auto rows = rows_of<D>(sharing, keys + first * bytes, last - first, bytes, bytes, place);
    if (active) multiply_channels<D, BITS>(rows, scales_of(sharing, scales, place), queries, first, last, place.lane, products, offsets);
  }
  if (!active) return;
  add_channels<D>(products, place.lane);
  for (int i = 0; i < D::QUERIES; ++i) {
    const float offset = Element<typename D::T, BITS>::quantized ? simd_sum(offsets[i]) : 0.0f;
    products[i * D::KEY_RUN] += offset;
    products[i * D::KEY_RUN + 1] += offset;
  }
}

// The same with the open page, token-major, of which only `present` tokens are there.
template <typename D, typename Queries>
inline void multiply_open(const device uchar* keys, Queries queries, int present, bool active, Place place, thread float* products) {
  typedef typename D::T T;
  constexpr int size = sizeof(T), bytes = 8 * size, stride = D::KEY_DIM * size;
  constexpr int part = D::SHARED ? rows_at_once(D::STAGE, 64 * size, D::KEY_DIM) / 8 * 8 : D::KEY_DIM;
  const int token = own_token<D>(place.lane);
  for (int first = 0; first < D::KEY_DIM; first += part) {
    const int last = min(first + part, D::KEY_DIM);
    auto rows = rows_of<D>(Sharing<D::SHARED>(), keys + first * size, present, (last - first) * size, stride, place);
    if (!active) continue;
    for (int channel = first; channel < last; channel += 8) {
      uint words[2 * bytes / 4];
      for (int i = 0; i < 2; ++i) {
        if (token + i < present) {
          load_run<bytes, 16>(rows, token + i, (channel - first) * size, words + i * bytes / 4);
        } else {
          for (int j = 0; j < bytes / 4; ++j) words[i * bytes / 4 + j] = 0;
        }
      }
      for (int j = 0; j < 8; ++j) {
        const float x = value_at<T, 16>(words, j), y = value_at<T, 16>(words + bytes / 4, j);
        for (int i = 0; i < D::QUERIES; ++i) {
          const float q = query_at<D>(queries, i, channel + j);
          products[i * D::KEY_RUN] += q * x;
          products[i * D::KEY_RUN + 1] += q * y;
        }
      }
    }
  }
}

// Products of the own tokens to weights, in place. All that was added up before shrinks to the new maximum.
template <typename D, bool QUANTIZED>
inline void weigh(Item item, int page, int first_query, float scale, float softcap, Place place, thread float* products,
                  thread State<D>& state) {
  const int token = own_token<D>(place.lane);
  const int position = page * 64 + token;
  const threadgroup half* scales = (const threadgroup half*)place.value_scales + token * D::GROUPS;
  float biases[2 * D::GROUPS];
  for (int g = 0; QUANTIZED && g < 2 * D::GROUPS; ++g) biases[g] = middle_of<D::V_BITS>(float(scales[g]), float(scales[64 * D::GROUPS + g]));
  for (int i = 0; i < D::QUERIES; ++i) {
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
    for (int j = 0; j < D::RUNS * D::VALUE_RUN; ++j) state.answers[i * D::RUNS * D::VALUE_RUN + j] *= shrink;
    for (int g = 0; g < D::GROUPS; ++g) {
      const float bias = QUANTIZED ? weight * biases[g] + next_weight * biases[D::GROUPS + g] : 0.0f;
      state.biases[i * D::GROUPS + g] = state.biases[i * D::GROUPS + g] * shrink + bias;
    }
  }
}

// Adds weighted values of tokens first to last. V's scale is multiplied into the weight instead of into a run of codes.
template <typename D, int BITS, typename Rows>
inline void add_values(Rows rows, int first, int last, Place place, thread State<D>& state) {
  typedef Element<typename D::T, BITS> E;
  constexpr int bytes = D::VALUE_RUN * E::bits / 8, words = (bytes + 3) / 4;
  const int own = place.lane % D::VALUE_LANES;
  const threadgroup half* scales = (const threadgroup half*)place.value_scales;
  for (int begin = first; begin < last; begin += D::VALUE_ROWS) {
    const int token = begin + int(place.lane) / D::VALUE_LANES;
    for (int run = 0; run < D::RUNS; ++run) {
      const int part = run * D::VALUE_LANES + own;
      if (token >= last || part >= D::PARTS) continue;
      uint codes[words];
      load_run<bytes, LoadWidth<bytes, ValueRows<D, BITS>::bytes>::value>(rows, token - first, part * bytes, codes);
      const float scale = E::quantized ? float(scales[token * D::GROUPS + part * D::VALUE_RUN / D::GROUP]) : 1.0f;
      for (int i = 0; i < D::QUERIES; ++i) {
        const float weight = place.weights[(token - first) * D::QUERIES + i] * scale;
        thread float* answers = state.answers + (i * D::RUNS + run) * D::VALUE_RUN;
        for (int j = 0; j < D::VALUE_RUN; ++j) answers[j] += weight * centred_value_at<typename D::T, BITS>(codes, j);
      }
    }
  }
}

// Weights to threadgroup memory, then the values of `present` tokens, part by part.
template <typename D, int BITS>
inline void add_page(const device uchar* values, int present, bool active, Place place, thread float* weights, thread State<D>& state) {
  constexpr int bytes = ValueRows<D, BITS>::bytes, part = ValueRows<D, BITS>::part;
  const int token = own_token<D>(place.lane);
  for (int first = 0; first < present; first += part) {
    const int last = min(first + part, present);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (token >= first && token < first + part) {
      for (int i = 0; i < D::QUERIES; ++i) {
        place.weights[(token - first) * D::QUERIES + i] = weights[i * D::KEY_RUN];
        place.weights[(token - first + 1) * D::QUERIES + i] = weights[i * D::KEY_RUN + 1];
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    auto rows = rows_of<D>(Sharing<D::SHARED>(), values + first * bytes, last - first, bytes, bytes, place);
    if (active) add_values<D, BITS>(rows, first, last, place, state);
  }
}

// One page, of one of three kinds: open, kept as it is (`~id` of the small pool), sealed.
template <typename D, typename Queries>
inline void attend_page(Pages<typename D::T> pages, Item item, int page, int id, Queries queries, int first_query, float scale,
                        float softcap, Place place, thread State<D>& state) {
  constexpr int keys = KeyRows<D, D::K_BITS>::bytes * D::KEY_DIM, plain_keys = KeyRows<D, 16>::bytes * D::KEY_DIM;
  constexpr int values = ValueRows<D, D::V_BITS>::bytes * 64, plain_values = ValueRows<D, 16>::bytes * 64;
  const bool active = first_query < item.count * D::HEADS;
  float products[D::QUERIES * D::KEY_RUN];
  for (int i = 0; i < D::QUERIES * D::KEY_RUN; ++i) products[i] = 0.0f;
  if (page == item.past / 64) {
    const int present = item.past + item.count - page * 64;
    multiply_open<D>(pages.open_keys, queries, present, active, place, products);
    if (active) weigh<D, false>(item, page, first_query, scale, softcap, place, products, state);
    add_page<D, 16>(pages.open_values, present, active, place, products, state);
  } else if (id < 0) {
    multiply_page<D, 16>(pages.first_keys + size_t(~id) * plain_keys, pages.key_scales, queries, active, place, products);
    if (active) weigh<D, false>(item, page, first_query, scale, softcap, place, products, state);
    add_page<D, 16>(pages.first_values + size_t(~id) * plain_values, 64, active, place, products, state);
  } else {
    const device half* key_scales = pages.key_scales + (D::K_BITS == 16 ? 0 : size_t(id) * 2 * D::KEY_DIM);
    const device half* value_scales = pages.value_scales + (D::V_BITS == 16 ? 0 : size_t(id) * 128 * D::GROUPS);
    together(Sharing<D::SHARED>());
    copy_scales<D>(key_scales, value_scales, place);
    together(Sharing<D::SHARED>());
    multiply_page<D, D::K_BITS>(pages.keys + size_t(id) * keys, key_scales, queries, active, place, products);
    if (active) weigh<D, D::V_BITS != 16>(item, page, first_query, scale, softcap, place, products, state);
    add_page<D, D::V_BITS>(pages.values + size_t(id) * values, 64, active, place, products, state);
  }
}

// All pages of this simdgroup: every one where simdgroups share them, every SIMDGROUPS-th where not.
template <typename D, typename Queries>
inline void attend_pages(Pages<typename D::T> pages, Item item, const device int* table, Queries queries, int first_query,
                         float scale, float softcap, Place place, thread State<D>& state) {
  for (int i = 0; i < D::QUERIES; ++i) state.softmax[i] = empty_softmax();
  for (int i = 0; i < D::QUERIES * D::RUNS * D::VALUE_RUN; ++i) state.answers[i] = 0.0f;
  for (int i = 0; i < D::QUERIES * D::GROUPS; ++i) state.biases[i] = 0.0f;
  const int step = D::SHARED ? 1 : D::SIMDGROUPS;
  for (int page = item.begin + (D::SHARED ? 0 : int(place.simdgroup)); page < item.end; page += step) {
    const int id = page == item.past / 64 ? 0 : table[item.table + page];
    attend_page<D>(pages, item, page, id, queries, first_query, scale, softcap, place, state);
  }
}

// Adds up over lanes: afterwards every lane has the sums and its channels' answers of all its simdgroup's tokens.
template <typename D>
inline void add_lanes(Place place, thread State<D>& state) {
  for (int i = 0; i < D::QUERIES; ++i) {
    state.softmax[i].sum = simd_sum(state.softmax[i].sum);
    thread float* answers = state.answers + i * D::RUNS * D::VALUE_RUN;
    for (int mask = D::VALUE_LANES; mask < 32; mask *= 2) {
      for (int j = 0; j < D::RUNS * D::VALUE_RUN; ++j) answers[j] += simd_shuffle_xor(answers[j], ushort(mask));
    }
    if (D::V_BITS == 16) continue;
    for (int g = 0; g < D::GROUPS; ++g) {
      const float bias = simd_sum(state.biases[i * D::GROUPS + g]);
      for (int run = 0; run < D::RUNS; ++run) {
        const int part = run * D::VALUE_LANES + int(place.lane) % D::VALUE_LANES;
        const float own = part * D::VALUE_RUN / D::GROUP == g ? bias : 0.0f;
        for (int j = 0; j < D::VALUE_RUN; ++j) answers[run * D::VALUE_RUN + j] += own;
      }
    }
  }
}

// Where answers go, `row` counting rows and heads, and the logarithm of their sums of weights. The answer to a whole sequence is
// final, in T; a sink takes part in its softmax without a value. The answer to a run of pages is merged later, and in float32.
template <typename O, typename Sinks>
struct Out {
  device O* answers;
  device float* logs;
  Sinks sinks;
  bool has_sinks;
};

template <typename O, typename Sinks>
inline void store(Out<O, Sinks> out, size_t row, int head, int dim, int channel, float answer, OnlineSoftmax softmax) {
  float sum = softmax.sum;
  if (out.has_sinks) sum += fast::exp2(float(out.sinks[head]) * kLog2e - softmax.maximum);
  out.answers[row * dim + channel] = static_cast<O>(sum > 0.0f ? answer / sum : 0.0f);
  if (channel == 0) out.logs[row] = sum > 0.0f ? softmax.maximum + log2(sum) : kNothing;
}

// Every simdgroup stores the answers of its own queries.
template <typename D, typename Out>
inline void store_own(Out out, Item item, int kv_head, int kv_heads, int first_query, Place place, thread State<D>& state) {
  if (int(place.lane) >= D::VALUE_LANES) return;
  for (int i = 0; i < D::QUERIES; ++i) {
    const int query = first_query + i, head = kv_head * D::HEADS + query % D::HEADS;
    if (query >= item.count * D::HEADS) continue;
    const size_t row = size_t(item.out + query / D::HEADS) * (kv_heads * D::HEADS) + head;
    for (int run = 0; run < D::RUNS; ++run) {
      const int part = run * D::VALUE_LANES + int(place.lane);
      for (int j = 0; part < D::PARTS && j < D::VALUE_RUN; ++j) {
        const float answer = state.answers[(i * D::RUNS + run) * D::VALUE_RUN + j];
        store(out, row, head, D::VALUE_DIM, part * D::VALUE_RUN + j, answer, state.softmax[i]);
      }
    }
  }
}

// Merges what the simdgroups have of the same queries, one query after another through `merged` [SIMDGROUPS][VALUE_DIM].
template <typename D, typename Out>
inline void store_merged(Out out, Item item, int kv_head, int kv_heads, Place place, threadgroup float* merged,
                         threadgroup float* softmaxes, thread State<D>& state) {
  for (int i = 0; i < D::QUERIES; ++i) {
    if (place.lane == 0) {
      softmaxes[(place.simdgroup * D::QUERIES + i) * 2] = state.softmax[i].maximum;
      softmaxes[(place.simdgroup * D::QUERIES + i) * 2 + 1] = state.softmax[i].sum;
    }
  }
  for (int i = 0; i < D::QUERIES; ++i) {
    if (i >= item.count * D::HEADS) break;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    OnlineSoftmax whole = empty_softmax();
    for (int s = 0; s < D::SIMDGROUPS; ++s) whole.maximum = max(whole.maximum, softmaxes[(s * D::QUERIES + i) * 2]);
    for (int s = 0; s < D::SIMDGROUPS; ++s) {
      const threadgroup float* of = softmaxes + (s * D::QUERIES + i) * 2;
      whole.sum += of[1] * fast::exp2(of[0] - whole.maximum);
    }
    const float shrink = fast::exp2(state.softmax[i].maximum - whole.maximum);
    for (int j = 0; j < D::RUNS * D::VALUE_RUN; ++j) {
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
      for (int s = 0; s < D::SIMDGROUPS; ++s) answer += merged[s * D::VALUE_DIM + channel];
      store(out, row, head, D::VALUE_DIM, channel, answer, whole);
    }
  }
}

// What a threadgroup's memory has to hold, in elements.
template <typename D, int STAGED_QUERIES>
struct Room {
  static constexpr constant int queries = STAGED_QUERIES > 0 ? STAGED_QUERIES * D::KEY_DIM : 1;
  static constexpr constant int stage = D::SHARED ? D::STAGE / 4 : 1;
  static constexpr constant int key_scales = D::SHARED && D::K_BITS != 16 ? D::KEY_DIM : 1;
  static constexpr constant int value_scales = D::V_BITS == 16 ? 1 : (D::SHARED ? 1 : D::SIMDGROUPS) * 64 * D::GROUPS;
  static constexpr constant int weights = WeightRows<D>::part * D::QUERIES;  // of a simdgroup
  static constexpr constant int merged = D::SHARED ? 1 : D::SIMDGROUPS * D::VALUE_DIM;
  static constexpr constant int softmaxes = D::SHARED ? 1 : D::SIMDGROUPS * D::QUERIES * 2;
};

// Tells at compile time whether queries are copied to threadgroup memory.
template <bool STAGED>
struct Staging {};

template <typename D, typename T>
inline StagedQueries<T> queries_of(Staging<true>, DeviceQueries<T> queries, threadgroup T* room, uint index) {
  for (int i = int(index); i < (queries.last + 1) * D::KEY_DIM; i += 32 * D::SIMDGROUPS) {
    const int query = i / D::KEY_DIM;
    room[i] = queries.start[uint(query / D::HEADS) * queries.row + uint(query % D::HEADS * D::KEY_DIM + i % D::KEY_DIM)];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  StagedQueries<T> staged;
  staged.start = room + queries.first * D::KEY_DIM;
  staged.last = queries.last - queries.first;
  return staged;
}

template <typename D, typename T>
inline DeviceQueries<T> queries_of(Staging<false>, DeviceQueries<T> queries, threadgroup T* room, uint index) {
  return queries;
}

//: kernel paged_attention_decode(queries, sealed_keys, key_scales, sealed_values, value_scales, first_keys, first_values, open_keys,
//:                               open_values, table, work, settings, sinks) -> answers, logs
//: threads (32 * SIMDGROUPS, KV heads, work items), groups of (32 * SIMDGROUPS, 1, 1)
typedef Decode<T, K_BITS, V_BITS, KEY_DIM, VALUE_DIM, GROUP, HEADS, QUERIES, KEY_RUN, VALUE_RUN, SIMDGROUPS, SHARED, STAGE> D;
typedef Room<D, STAGED_QUERIES> R;
threadgroup T query_room[R::queries];
threadgroup uint stage[R::stage];
threadgroup uint key_scale_room[R::key_scales];
threadgroup uint value_scale_room[R::value_scales];
threadgroup float weights[SIMDGROUPS * R::weights];
threadgroup float merged[R::merged];
threadgroup float softmaxes[R::softmaxes];

Place place;
place.lane = thread_index_in_simdgroup;
place.simdgroup = simdgroup_index_in_threadgroup;
place.index = thread_index_in_threadgroup;
place.stage = stage;
place.key_scales = key_scale_room;
place.value_scales = value_scale_room + (SHARED ? 0 : place.simdgroup * (V_BITS == 16 ? 0 : 64 * D::GROUPS));
place.weights = weights + place.simdgroup * R::weights;

const int head = threadgroup_position_in_grid.y, heads = threadgroups_per_grid.y;
const Item item = item_at(work, threadgroup_position_in_grid.z);
const size_t sealed = size_t(head) * sealed_keys_shape[1], first = size_t(head) * first_keys_shape[1];
const size_t open = size_t(item.slot) * heads + head;
Pages<T> pages;
pages.keys = (const device uchar*)sealed_keys + sealed * (KeyRows<D, K_BITS>::bytes * KEY_DIM);
pages.key_scales = key_scales + (K_BITS == 16 ? 0 : sealed * 2 * KEY_DIM);
pages.values = (const device uchar*)sealed_values + sealed * (ValueRows<D, V_BITS>::bytes * 64);
pages.value_scales = value_scales + (V_BITS == 16 ? 0 : sealed * 128 * D::GROUPS);
pages.first_keys = (const device uchar*)first_keys + first * (KeyRows<D, 16>::bytes * KEY_DIM);
pages.first_values = (const device uchar*)first_values + first * (ValueRows<D, 16>::bytes * 64);
pages.open_keys = (const device uchar*)open_keys + open * (64 * KEY_DIM * sizeof(T));
pages.open_values = (const device uchar*)open_values + open * (64 * VALUE_DIM * sizeof(T));

const int first_query = SHARED ? int(place.simdgroup) * QUERIES : 0;
DeviceQueries<T> all;
all.row = uint(heads * HEADS * KEY_DIM);
all.start = queries + size_t(item.row) * all.row + head * HEADS * KEY_DIM;
all.first = first_query;
all.last = item.count * HEADS - 1;
const auto own = queries_of<D>(Staging<(STAGED_QUERIES > 0)>(), all, query_room, place.index);
State<D> state;
attend_pages<D>(pages, item, table, own, first_query, settings[0], settings[1], place, state);
add_lanes<D>(place, state);

typedef Out<O, decltype(&sinks[0])> Answers;
Answers out;
out.answers = answers;
out.logs = logs;
out.sinks = &sinks[0];
out.has_sinks = settings[2] != 0.0f;
if (SHARED) {
  store_own<D>(out, item, head, heads, first_query, place, state);
} else {
  store_merged<D>(out, item, head, heads, place, merged, softmaxes, state);
}
