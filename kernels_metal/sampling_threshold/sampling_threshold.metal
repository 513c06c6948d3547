// Where top-k and top-p cut a row of logits, without sorting it. README.md explains the search.
//
// Logits are compared as integers in the same order (`key_of`). A threadgroup searches a row for the largest key at and above which
// enough lies: k logits, or the part top_p of all weight. What it looks at are blocks of 128 logits whose largest is high enough.
#include "include/unroll.h"
#include "include/softmax.h"

constant constexpr int kBlock = 128;
constant constexpr int kThresholds = 15;  // tried at once
constant constexpr int kSlots = 12;       // of a thread, for logits that are left
constant constexpr float kFew = 512.0f;   // logits that probably find a slot

// What is not a number counts as minus infinity, and minus zero as zero.
inline float cleaned(float x) { return x > -INFINITY ? x + 0.0f : -INFINITY; }

inline uint key_of(float x) {
  const uint bits = as_type<uint>(x);
  return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

inline float value_of(uint key) { return as_type<float>((key & 0x80000000u) != 0u ? key & 0x7fffffffu : ~key); }

// Sums and maxima over a threadgroup, in a fixed order. Turns alternate between two places, so that one barrier for each is enough.
template <int SIMDGROUPS>
struct Team {
  threadgroup float* parts;  // [2][SIMDGROUPS]
  uint simdgroup, lane;
  int turn;
};

template <int SIMDGROUPS>
inline threadgroup float* shared(thread Team<SIMDGROUPS>& team, float x) {
  threadgroup float* parts = team.parts + team.turn * SIMDGROUPS;
  team.turn = 1 - team.turn;
  if (team.lane == 0) parts[team.simdgroup] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return parts;
}

template <int SIMDGROUPS>
inline float sum_of_all(thread Team<SIMDGROUPS>& team, float x) {
  const threadgroup float* parts = shared(team, simd_sum(x));
  float sum = 0.0f;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) sum += parts[s];
  return sum;
}

template <int SIMDGROUPS>
inline float largest_of_all(thread Team<SIMDGROUPS>& team, float x) {
  const threadgroup float* parts = shared(team, simd_max(x));
  float largest = parts[0];
  UNROLL for (int s = 1; s < SIMDGROUPS; ++s) largest = max(largest, parts[s]);
  return largest;
}

// A row of logits and its blocks.
struct Row {
  const device float* logits;
  const device float* maxima;
  int size, blocks;
  float highest;
};

// What is looked for: at and above the key `low` lies at least `goal`, at and above `high` less, namely `above`. Everything counts
// one, or its weight.
struct Search {
  uint low, high;
  float goal, at_low, above;
  bool counts;
};

inline float amount_of(Row row, Search search, float x) { return search.counts ? 1.0f : exponential(x - row.highest); }

// The keys to try next: half a unit of the logarithm of weight apart while nothing is known, then evenly.
inline uint key_to_try(Row row, Search search, int depths, int i) {
  if (depths > 0) return min(key_of(row.highest - (depths == 1 ? 0.5f * float(i + 1) : 7.5f + 1.5f * float(i + 1))), search.high);
  const uint width = search.high - search.low;
  return search.low + width / 16u * uint(i + 1) + (width % 16u) * uint(i + 1) / 16u;
}

// Tries several keys in one pass over the blocks that matter, and narrows the search to what lies between two of them.
template <int SIMDGROUPS>
inline void narrow(Row row, thread Search& search, int depths, thread Team<SIMDGROUPS>& team) {
  uint keys[kThresholds];
  float found[kThresholds];
  uint least = search.high;
  UNROLL for (int i = 0; i < kThresholds; ++i) {
    keys[i] = max(key_to_try(row, search, depths, i), search.low);
    found[i] = 0.0f;
    least = min(least, keys[i]);
  }
  for (int block = int(team.simdgroup); block < row.blocks; block += SIMDGROUPS) {
    if (key_of(row.maxima[block]) < least) continue;
    UNROLL for (int j = 0; j < kBlock / 32; ++j) {
      const int at = block * kBlock + j * 32 + int(team.lane);
      const float x = at < row.size ? cleaned(row.logits[at]) : -INFINITY;
      const uint key = at < row.size ? key_of(x) : 0u;
      const float weight = amount_of(row, search, x);
      UNROLL for (int i = 0; i < kThresholds; ++i) found[i] += key >= keys[i] ? weight : 0.0f;
    }
  }
  UNROLL for (int i = 0; i < kThresholds; ++i) {
    const float sum = sum_of_all(team, found[i]);
    if (sum >= search.goal) {
      if (keys[i] > search.low) {
        search.low = keys[i];
        search.at_low = sum;
      }
    } else if (keys[i] < search.high) {
      search.high = keys[i];
      search.above = sum;
    }
  }
}

// Puts the logits that are left into the threads' slots, and ends the search among them. False if a thread has too few slots.
template <int SIMDGROUPS>
inline bool finish(Row row, thread Search& search, threadgroup uint* keys, threadgroup float* weights, thread Team<SIMDGROUPS>& team) {
  constexpr int threads = 32 * SIMDGROUPS;
  const int own = int(team.simdgroup) * 32 + int(team.lane);
  int count = 0;
  for (int block = int(team.simdgroup); block < row.blocks; block += SIMDGROUPS) {
    if (key_of(row.maxima[block]) < search.low) continue;
    UNROLL for (int j = 0; j < kBlock / 32; ++j) {
      const int at = block * kBlock + j * 32 + int(team.lane);
      if (at >= row.size) continue;
      const float x = cleaned(row.logits[at]);
      const uint key = key_of(x);
      if (key < search.low || key >= search.high) continue;
      if (count < kSlots) {
        keys[count * threads + own] = key;
        weights[count * threads + own] = amount_of(row, search, x);
      }
      ++count;
    }
  }
  if (largest_of_all(team, float(count)) > float(kSlots)) return false;
  while (search.high - search.low > 1u) {
    const uint middle = search.low + (search.high - search.low) / 2u;
    float found = 0.0f;
    for (int i = 0; i < count; ++i) found += keys[i * threads + own] >= middle ? weights[i * threads + own] : 0.0f;
    const float sum = search.above + sum_of_all(team, found);
    if (sum >= search.goal) search.low = middle;
    else search.high = middle;
  }
  return true;
}

// Ends a search. `low` is the answer: 0 if all logits together are not enough.
template <int SIMDGROUPS>
inline void find(Row row, thread Search& search, threadgroup uint* keys, threadgroup float* weights, thread Team<SIMDGROUPS>& team) {
  narrow(row, search, 1, team);
  if (search.low == 0u) narrow(row, search, 2, team);
  while (search.high - search.low > 1u) {
    // Each logit that is left weighs at least as much as the lowest.
    const bool few = search.low > 0u && search.at_low - search.above <= kFew * amount_of(row, search, value_of(search.low));
    if (few && finish(row, search, keys, weights, team)) return;
    narrow(row, search, 0, team);
  }
}

// How many logits lie at and above a key, and what they weigh.
template <int SIMDGROUPS>
inline float2 tally(Row row, uint key, thread Team<SIMDGROUPS>& team) {
  float count = 0.0f, weight = 0.0f;
  for (int block = int(team.simdgroup); block < row.blocks; block += SIMDGROUPS) {
    if (key_of(row.maxima[block]) < key) continue;
    UNROLL for (int j = 0; j < kBlock / 32; ++j) {
      const int at = block * kBlock + j * 32 + int(team.lane);
      const float x = at < row.size ? cleaned(row.logits[at]) : -INFINITY;
      if (at < row.size && key_of(x) >= key) {
        count += 1.0f;
        weight += exponential(x - row.highest);
      }
    }
  }
  count = sum_of_all(team, count);
  return float2(count, sum_of_all(team, weight));
}

// The lowest logit that stays: of the k highest, those before which less than top_p of their weight lies.
template <int SIMDGROUPS>
inline float lowest_kept(Row row, float total, float top_k, float top_p, threadgroup uint* keys, threadgroup float* weights,
                         thread Team<SIMDGROUPS>& team) {
  Search search;
  search.low = 0u;
  if (top_k < float(row.size)) {
    search.high = key_of(row.highest) + 1u;
    search.goal = top_k;
    search.at_low = float(row.size);
    search.above = 0.0f;
    search.counts = true;
    find(row, search, keys, weights, team);
    // Of several that share the last place, as many count as there are places.
    const float2 above = tally(row, search.low + 1u, team);
    total = above.y + (top_k - above.x) * exponential(value_of(search.low) - row.highest);
  }
  if (top_p < 1.0f) {
    search.high = key_of(row.highest) + 1u;
    search.goal = top_p * total;
    search.at_low = total;
    search.above = 0.0f;
    search.counts = false;
    find(row, search, keys, weights, team);
  }
  return search.low == 0u ? -INFINITY : value_of(search.low);
}

//: kernel sampling_blocks(logits) -> maxima, sums
//: threads (256, blocks / 8 rounded up, rows), groups of (256, 1, 1). A simdgroup has a block: its largest logit, and e^(x - largest) summed.
constexpr int blocks = (SIZE + kBlock - 1) / kBlock;
const int block = int(threadgroup_position_in_grid.y) * 8 + int(simdgroup_index_in_threadgroup);
const size_t row = threadgroup_position_in_grid.z;
if (block < blocks) {
  float x[kBlock / 32], largest = -INFINITY, sum = 0.0f;
  UNROLL for (int j = 0; j < kBlock / 32; ++j) {
    const int at = block * kBlock + j * 32 + int(thread_index_in_simdgroup);
    x[j] = at < SIZE ? cleaned(logits[row * SIZE + at]) : -INFINITY;
    largest = max(largest, x[j]);
  }
  largest = simd_max(largest);
  UNROLL for (int j = 0; j < kBlock / 32; ++j) sum += largest > -INFINITY ? exponential(x[j] - largest) : 0.0f;
  sum = simd_sum(sum);
  if (thread_index_in_simdgroup == 0) {
    maxima[row * blocks + block] = largest;
    sums[row * blocks + block] = sum;
  }
}

//: kernel sampling_threshold(logits, maxima, sums, limits) -> threshold
//: threads (256, rows, 1), groups of (256, 1, 1). `limits` [rows or more][2]: top_k and top_p of each row.
threadgroup float parts[16];
threadgroup uint keys[kSlots * 256];
threadgroup float weights[kSlots * 256];
Team<8> team;
team.parts = parts;
team.simdgroup = simdgroup_index_in_threadgroup;
team.lane = thread_index_in_simdgroup;
team.turn = 0;
const size_t number = threadgroup_position_in_grid.y;
Row row;
row.size = SIZE;
row.blocks = (SIZE + kBlock - 1) / kBlock;
row.logits = logits + number * SIZE;
row.maxima = maxima + number * row.blocks;
float highest = -INFINITY, total = 0.0f;
for (int i = int(thread_position_in_threadgroup.x); i < row.blocks; i += 256) highest = max(highest, row.maxima[i]);
row.highest = largest_of_all(team, highest);
float kept = -INFINITY;
if (row.highest > -INFINITY && row.highest < INFINITY) {
  for (int i = int(thread_position_in_threadgroup.x); i < row.blocks; i += 256) {
    total += sums[number * row.blocks + i] * exponential(row.maxima[i] - row.highest);
  }
  total = sum_of_all(team, total);
  kept = lowest_kept(row, total, limits[2 * number], limits[2 * number + 1], keys, weights, team);
}
if (thread_position_in_threadgroup.x == 0) threshold[number] = kept;
