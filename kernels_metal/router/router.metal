// The experts of a row and their weights, from the router's logits. README.md has the arithmetic.
//
// A simdgroup has a row. Lane l keeps experts l, 32 + l, ... as integers of the same order, and takes the place l of the result.
#include "include/unroll.h"

constant constexpr int kNone = 0;     // scores are the logits; the shares are a softmax over the chosen ones
constant constexpr int kSoftmax = 1;  // over all experts
constant constexpr int kSigmoid = 2;

// What is not a number counts as minus infinity, and minus zero as zero. Integers below that of minus infinity are free for other uses.
inline uint key_of(float x) {
  uint bits = as_type<uint>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0xff800000u;
  if (bits == 0x80000000u) bits = 0u;
  return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

inline float cleaned(float x) { return x > -INFINITY ? x : -INFINITY; }

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// The sum of the RANKED largest of a group's SIZE numbers. Lanes start at different numbers, which lie in different banks.
template <int SIZE, int RANKED>
inline float rank_of(const threadgroup float* group, uint lane) {
  float best[RANKED], sum = 0.0f;
  UNROLL for (int r = 0; r < RANKED; ++r) best[r] = -INFINITY;
  for (int i = 0; i < SIZE; ++i) {
    float x = group[(i + int(lane)) % SIZE];
    UNROLL for (int r = 0; r < RANKED; ++r) {
      const float lower = min(best[r], x);
      best[r] = max(best[r], x);
      x = lower;
    }
  }
  UNROLL for (int r = 0; r < RANKED; ++r) sum += best[r];
  return sum;
}

// A bit for each of the KEPT lanes with the largest keys; of equal ones the lowest lane.
template <int KEPT>
inline uint best_lanes(uint key, uint lane) {
  uint found = 0u;
  for (int i = 0; i < KEPT; ++i) {
    const uint most = simd_max(key);
    const uint winner = simd_min(key == most ? lane : 32u);
    found |= 1u << winner;
    if (lane == winner) key = 0u;
  }
  return found;
}

//: kernel router(logits, bias, gains, settings) -> experts, shares
//: threads (32 rows, 1, 1), groups of (32, 1, 1). `settings`: the least sum, what is added to it, and the scale.
constexpr int PER = (EXPERTS + 31) / 32;
constexpr bool grouped = KEPT < GROUPS, scored = BIASED || grouped;
constexpr int members = EXPERTS / GROUPS;
threadgroup float wanted[grouped ? EXPERTS : 1];
const uint lane = thread_index_in_simdgroup;
const size_t row = threadgroup_position_in_grid.x;
float x[PER], highest = -INFINITY, total = 0.0f;
UNROLL for (int j = 0; j < PER; ++j) {
  const uint expert = 32u * uint(j) + lane;
  x[j] = expert < uint(EXPERTS) ? float(logits[row * EXPERTS + expert]) : -INFINITY;
  highest = max(highest, cleaned(x[j]));
}
if (SCORES == kSoftmax) {
  highest = simd_max(highest);
  UNROLL for (int j = 0; j < PER; ++j) total += precise::exp(x[j] - highest);
  total = simd_sum(total);
}
uint keys[PER];
UNROLL for (int j = 0; j < PER; ++j) {
  const uint expert = 32u * uint(j) + lane;
  float want = x[j];
  if (scored) {
    if (SCORES == kSoftmax) want = precise::exp(want - highest) / total;
    if (SCORES == kSigmoid) want = sigmoid(want);
    if (BIASED && expert < uint(EXPERTS)) want += float(bias[expert]);
    if (grouped && expert < uint(EXPERTS)) wanted[expert] = cleaned(want);
  }
  keys[j] = expert < uint(EXPERTS) ? key_of(want) : 0u;
}
if (grouped) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const bool has = lane < uint(GROUPS);
  const uint rank = has ? key_of(rank_of<members, RANKED>(wanted + lane * uint(members), lane)) : 0u;
  const uint kept = best_lanes<KEPT>(rank, lane);
  UNROLL for (int j = 0; j < PER; ++j) {
    const uint expert = 32u * uint(j) + lane;
    if (expert < uint(EXPERTS) && (kept >> (expert / uint(members)) & 1u) == 0u) keys[j] = 1u;
  }
}
uint mine = 0u;
ROLLED for (int i = 0; i < CHOSEN; ++i) {
  uint best = 0u, at = uint(EXPERTS);
  UNROLL for (int j = 0; j < PER; ++j) {
    if (keys[j] > best) {
      best = keys[j];
      at = 32u * uint(j) + lane;
    }
  }
  const uint most = simd_max(best);
  const uint winner = simd_min(best == most ? at : uint(EXPERTS));
  if (int(lane) == i) mine = winner;
  UNROLL for (int j = 0; j < PER; ++j) keys[j] = 32u * uint(j) + lane == winner ? 0u : keys[j];
}
const bool chosen = int(lane) < CHOSEN;
float share = float(logits[row * EXPERTS + mine]);
if (SCORES == kSoftmax) share = precise::exp(share - highest) / total;
if (SCORES == kSigmoid) share = sigmoid(share);
if (SCORES == kNone) {
  share = precise::exp(share - simd_max(chosen ? cleaned(share) : -INFINITY));
  share /= simd_sum(chosen ? share : 0.0f);
}
if (NORMALIZED) share /= max(simd_sum(chosen ? share : 0.0f), settings[0]) + settings[1];
share *= settings[2];
if (GAINED) share *= float(gains[mine]);
if (chosen) {
  experts[row * CHOSEN + lane] = mine;
  shares[row * CHOSEN + lane] = share;
}
