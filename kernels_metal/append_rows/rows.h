// Biases, norms and rotation of heads, and the newest rows of open pages: the kernels that append rows share these.
//
// A simdgroup makes one head of one row. Arithmetic is in float32, and rounds once, after the sum with a bias once more.
#pragma once

// What is done to a head: a sum with the projection's bias, a norm, unless `eps` is negative, with weights if `weighted`, then the
// rotation of channel i with channel i + pairs, for i below pairs.
template <typename Bias, typename Weights, typename Waves>
struct Steps {
  Bias bias;  // of the head, by channel
  bool biased;
  Weights weights;  // of the norm, by channel
  float eps;
  Waves waves;  // of the row: cosines of all pairs, then sines
  int pairs;
  bool weighted;
};

template <typename T, typename Bias, typename Weights, typename Waves>
inline float biased(const device T* from, Steps<Bias, Weights, Waves> steps, int channel) {
  const float x = float(from[channel]);
  return steps.biased ? float(static_cast<T>(x + float(steps.bias[channel]))) : x;
}

template <typename T, typename Bias, typename Weights, typename Waves>
inline float normed(const device T* from, Steps<Bias, Weights, Waves> steps, float factor, int channel) {
  const float x = biased(from, steps, channel);
  if (steps.eps < 0.0f) return x;
  return steps.weighted ? x * factor * float(steps.weights[channel]) : x * factor;
}

// `To` points to device or threadgroup memory.
template <int DIM, typename T, typename To, typename Bias, typename Weights, typename Waves>
inline void make_head(const device T* from, To to, Steps<Bias, Weights, Waves> steps, uint lane) {
  float factor = 1.0f;
  if (steps.eps >= 0.0f) {
    float squares = 0.0f;
    for (int i = int(lane); i < DIM; i += 32) {
      const float x = biased(from, steps, i);
      squares += x * x;
    }
    factor = precise::rsqrt(simd_sum(squares) / float(DIM) + steps.eps);
  }
  for (int i = int(lane); i < DIM; i += 32) {
    float x = normed(from, steps, factor, i);
    if (i < 2 * steps.pairs) {
      const bool low = i < steps.pairs;
      const int pair = low ? i : i - steps.pairs;
      const float other = normed(from, steps, factor, low ? i + steps.pairs : pair);
      x = x * steps.waves[pair] + (low ? -other : other) * steps.waves[steps.pairs + pair];
    }
    to[i] = static_cast<T>(x);
  }
}

// A row of another head that is finished, or none at all.
template <int DIM, typename T>
inline void copy_head(const device T* from, bool there, device T* to, uint lane) {
  for (int i = int(lane); i < DIM; i += 32) to[i] = there ? from[i] : T(0);
}

// Rows of keys or of values: a step's own, and recent ones `[entries][KV heads][rows]` before the step and after it.
template <typename T>
struct RecentRows {
  const device T* rows;  // of the step, from the first head on
  int width;             // elements from row to row
  const device T* before;
  int before_length;  // rows of an entry
  device T* after;
  int length;  // rows of an entry
};

// Row `place` of an entry, one head: one that the entry has kept is copied, a new one is made, and what is left is zero. `entry`: its number
// before the step, rows kept of it, first row of the step, number of new rows. `steps.waves` are those of the step's first row,
// `steps.bias` those of the first head.
template <int DIM, typename T, typename Bias, typename Weights, typename Waves>
inline void make_recent(RecentRows<T> recent, Steps<Bias, Weights, Waves> steps, const device int* entry, int number, int place, int head, int heads,
                        uint lane) {
  const int kept = entry[1], row = entry[2] + place - kept;
  const size_t before = size_t(entry[0] * heads + head) * recent.before_length + place;
  device T* to = recent.after + (size_t(number * heads + head) * recent.length + place) * DIM;
  if (place >= kept && place < kept + entry[3]) {
    steps.waves += row * 2 * steps.pairs;
    steps.bias += head * DIM;
    make_head<DIM>(recent.rows + size_t(row) * recent.width + head * DIM, to, steps, lane);
  } else {
    copy_head<DIM>(recent.before + before * DIM, place < kept, to, lane);
  }
}
