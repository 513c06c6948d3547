// Attention of many query rows to the pages of their sequences.
//
// A threadgroup answers one tile: up to 8 * BLOCKS neighbouring rows of one sequence, all in the same page, for HEADS query heads of one
// KV head. Each simdgroup holds the queries of 8 rows and one head; all of them read the same keys and values, which are brought into
// threadgroup memory KEYS tokens at a time, taken apart once for everybody: first the keys, then the values in the same place.
//
//   scores  [8 rows, KEYS]  8x8 matrices in registers, products of T summed in float32
//   answer  [8 rows, DV]    8x8 matrices in registers, float32; SPLITS simdgroups share the channels where a head is too wide for one
//
// Earlier pages are read in their sealed form, the rows' own page raw. Every score stays in registers.
#pragma once

// What a tile is: `tiles` has eight numbers for each.
struct Tile {
  int row;       // of the step, the tile's first
  int rows;
  int position;  // of that row in its sequence
  int past;      // tokens of the sequence before this step
  int slot;      // of its open page
  int table;     // where the table has page 0 of the sequence; pages that nobody sees any more are not there
  int answer;    // row of the output for the tile's first
};

inline Tile read_tile(const device int* tiles, uint index) {
  const device int* t = tiles + 8 * index;
  return {t[0], t[1], t[2], t[3], t[4], t[5], t[6]};
}

// Everything that does not change from tile to tile.
template <typename T>
struct Operands {
  const device T* q;          // [rows, query_heads, DK]
  const device T* k;          // [rows, kv_heads, DK], the step's own
  const device T* v;          // [rows, kv_heads, DV]
  const device T* open_keys;  // [slots, kv_heads, 64, DK]
  const device T* open_values;
  Page pool;                  // [kv_heads, pool_pages, ...]
  Page filled;                // [kv_heads, filled_pages, ...], what this step has sealed
  Page first;                 // [kv_heads, first_pages, ...], at 16 bits
  const device int* table;
  const device float* sinks;
  int query_heads, kv_heads, pool_pages, filled_pages, first_pages;
  float scale, softcap;
};

template <typename T, int DK, int DV, int K_BITS, int V_BITS, int V_GROUP>
inline Page page_at(Page pool, ulong index) {
  return {
      pool.keys + index * DK * RowBytes<T, K_BITS, 64>::value,
      pool.key_scales + index * 2 * DK,
      pool.values + index * 64 * RowBytes<T, V_BITS, DV>::value,
      pool.value_scales + index * 2 * 64 * (DV / V_GROUP),
  };
}

template <typename T>
inline simdgroup_matrix<T, 8, 8> query_fragment(const device T* q, int stride, int rows, uint lane) {
  const int row = int(fragment_row(lane));
  const device T* from = q + row * stride + int(fragment_column(lane));
  simdgroup_matrix<T, 8, 8> m;
  m.thread_elements()[0] = row < rows ? from[0] : T(0);
  m.thread_elements()[1] = row < rows ? from[1] : T(0);
  return m;
}

// scores = q times the keys of the tile, transposed.
template <typename T, int DK, int KEYS, int LINE>
inline void multiply_keys(
    const threadgroup T* keys, const device T* q, int stride, int rows, uint lane, thread simdgroup_matrix<float, 8, 8>* scores) {
#pragma clang loop unroll(full)
  for (int n = 0; n < KEYS / 8; ++n) scores[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int channel = 0; channel < DK; channel += 8) {
    const simdgroup_matrix<T, 8, 8> left = query_fragment(q + channel, stride, rows, lane);
#pragma clang loop unroll(full)
    for (int n = 0; n < KEYS / 8; ++n) {
      simdgroup_matrix<T, 8, 8> right;
      simdgroup_load(right, keys + 8 * n * LINE + channel, LINE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(scores[n], left, right, scores[n]);
    }
  }
}

// Scores become weights, in place; returns what the answer so far has to be multiplied by.
template <int KEYS, int WINDOW>
inline float weigh(
    thread simdgroup_matrix<float, 8, 8>* scores, thread OnlineSoftmax& softmax, int position, int first, float scale, float softcap, uint lane) {
  // How far behind the query the lane's first key lies.
  const int distance = position + int(fragment_row(lane)) - first - int(fragment_column(lane));
  float highest = kNothing;
#pragma clang loop unroll(full)
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 2; ++i) {
      const int behind = distance - 8 * n - i;
      const float score = score_of(scores[n].thread_elements()[i], scale, softcap);
      scores[n].thread_elements()[i] = score;
      if (behind >= 0 && (WINDOW == 0 || behind < WINDOW)) highest = max(highest, score);
    }
  }
  const float shrink = raise_maximum(softmax, row_maximum(highest));
#pragma clang loop unroll(full)
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 2; ++i) {
      const int behind = distance - 8 * n - i;
      const bool visible = behind >= 0 && (WINDOW == 0 || behind < WINDOW);
      scores[n].thread_elements()[i] = weight_of(softmax, scores[n].thread_elements()[i], visible);
    }
  }
  return shrink;
}

// answer = shrink * answer + weights times the values of the tile.
template <typename T, int CHANNELS, int KEYS, int LINE>
inline void multiply_values(
    const threadgroup T* values, const thread simdgroup_matrix<float, 8, 8>* weights, float shrink, thread simdgroup_matrix<float, 8, 8>* answer) {
#pragma clang loop unroll(full)
  for (int d = 0; d < CHANNELS / 8; ++d) {
    answer[d].thread_elements()[0] *= shrink;
    answer[d].thread_elements()[1] *= shrink;
#pragma clang loop unroll(full)
    for (int n = 0; n < KEYS / 8; ++n) {
      simdgroup_matrix<T, 8, 8> right;
      simdgroup_load(right, values + 8 * n * LINE + 8 * d, LINE);
      simdgroup_multiply_accumulate(answer[d], weights[n], right, answer[d]);
    }
  }
}

// Brings KEYS tokens from `first` on into the tile: of keys, or of values.
template <typename T, int DK, int DV, int K_BITS, int V_BITS, int V_GROUP, int KEYS, bool OF_KEYS>
inline void stage(threadgroup T* tile, thread const Operands<T>& x, Tile t, int kv_head, int first, int last, uint index, uint threads) {
  constexpr int LINE = (OF_KEYS ? DK : DV) + 8;
  const int number = first / 64;
  if (number == t.position / 64) {
    constexpr int DIM = OF_KEYS ? DK : DV;
    const device T* open = (OF_KEYS ? x.open_keys : x.open_values) + ulong(t.slot * x.kv_heads + kv_head) * 64 * DIM;
    const int stride = x.kv_heads * DIM;
    const device T* fresh = (OF_KEYS ? x.k : x.v) + long(t.row - t.position) * stride + kv_head * DIM;
    stage_raw<T, DIM, KEYS, LINE>(tile, open, fresh, stride, first, t.past, last, index, threads);
    return;
  }
  const int id = x.table[t.table + number];
  const uint offset = uint(first % 64);
  if (id < 0) {
    const Page page = page_at<T, DK, DV, 16, 16, DV>(x.first, ulong(kv_head) * x.first_pages + ulong(~id));
    if (OF_KEYS) stage_keys<T, 16, DK, KEYS, LINE>(tile, page, offset, index, threads);
    else stage_values<T, 16, DV, DV, KEYS, LINE>(tile, page, offset, index, threads);
    return;
  }
  const bool fresh = id >= x.pool_pages;
  const ulong place = fresh ? ulong(kv_head) * x.filled_pages + ulong(id - x.pool_pages) : ulong(kv_head) * x.pool_pages + ulong(id);
  Page pool = x.pool;
  if (fresh) pool = x.filled;
  const Page page = page_at<T, DK, DV, K_BITS, V_BITS, V_GROUP>(pool, place);
  if (OF_KEYS) stage_keys<T, K_BITS, DK, KEYS, LINE>(tile, page, offset, index, threads);
  else stage_values<T, V_BITS, DV, V_GROUP, KEYS, LINE>(tile, page, offset, index, threads);
}

template <typename T, int DK, int DV, int K_BITS, int V_BITS, int V_GROUP, int GROUP, int HEADS, int BLOCKS, int SPLITS, int KEYS, int WINDOW, bool SINKS>
inline void paged_attention_prefill(
    thread const Operands<T>& x, Tile t, uint heads, threadgroup T* tile, uint simdgroup_index, uint lane, device T* out) {
  constexpr int CHANNELS = DV / SPLITS;
  constexpr uint THREADS = 32 * HEADS * BLOCKS * SPLITS;
  const uint index = simdgroup_index * 32 + lane;
  const int kv_head = int(heads) / (GROUP / HEADS);
  const int block = int(simdgroup_index) / SPLITS;
  const int head = int(heads) * HEADS + block % HEADS;
  const int row = block / HEADS * 8, split = int(simdgroup_index) % SPLITS;
  const int rows = t.rows - row;  // of this simdgroup; none if not above zero
  const int stride = x.query_heads * DK;
  const device T* q = x.q + long(t.row + row) * stride + head * DK;

  simdgroup_matrix<float, 8, 8> answer[CHANNELS / 8];
#pragma clang loop unroll(full)
  for (int d = 0; d < CHANNELS / 8; ++d) answer[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  OnlineSoftmax softmax = empty_softmax();
  if (SINKS) {
    softmax.maximum = x.sinks[head] * kLog2e;
    softmax.sum = fragment_column(lane) == 0 ? 1.0f : 0.0f;
  }
  const int last = t.position + t.rows - 1;
  const int oldest = WINDOW > 0 ? max(t.position - WINDOW + 1, 0) : 0;
  for (int first = oldest / KEYS * KEYS; first <= last; first += KEYS) {
    simdgroup_matrix<float, 8, 8> scores[KEYS / 8];
    stage<T, DK, DV, K_BITS, V_BITS, V_GROUP, KEYS, true>(tile, x, t, kv_head, first, last, index, THREADS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float shrink = 1.0f;
    if (rows > 0) {
      multiply_keys<T, DK, KEYS, DK + 8>(tile, q, stride, rows, lane, scores);
      shrink = weigh<KEYS, WINDOW>(scores, softmax, t.position + row, first, x.scale, x.softcap, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<T, DK, DV, K_BITS, V_BITS, V_GROUP, KEYS, false>(tile, x, t, kv_head, first, last, index, THREADS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (rows > 0) multiply_values<T, CHANNELS, KEYS, DV + 8>(tile + split * CHANNELS, scores, shrink, answer);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (rows <= 0) return;
  const float sum = row_sum(softmax.sum);
  if (int(fragment_row(lane)) >= rows) return;
  device T* to = out + (long(t.answer + row + int(fragment_row(lane))) * x.query_heads + head) * DV + split * CHANNELS + int(fragment_column(lane));
#pragma clang loop unroll(full)
  for (int d = 0; d < CHANNELS / 8; ++d) {
    to[8 * d] = static_cast<T>(answer[d].thread_elements()[0] / sum);
    to[8 * d + 1] = static_cast<T>(answer[d].thread_elements()[1] / sum);
  }
}
