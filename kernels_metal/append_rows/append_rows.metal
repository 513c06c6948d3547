// New rows of a step on their way into the cache: norms and rotation of heads, and the newest rows of open pages together with the old ones.
//
// A simdgroup makes one head of one row: of the queries, which the attention reads next, or of the recent keys or values, `length` rows for
// each entry and KV head. Those that an entry has kept are copied, its new ones are made, and what is left are zeros. Arithmetic is in
// float32, and rounds once.

// What is done to a head: a norm, unless `eps` is negative, then the rotation of channel i with channel i + pairs, for i below pairs.
template <typename Weights, typename Waves>
struct Steps {
  Weights weights;  // of the norm, by channel
  float eps;
  Waves waves;  // of the row: cosines of all pairs, then sines
  int pairs;
};

template <typename T, typename Weights, typename Waves>
inline float normed(const device T* from, Steps<Weights, Waves> steps, float factor, int channel) {
  const float x = float(from[channel]);
  return steps.eps < 0.0f ? x : x * factor * float(steps.weights[channel]);
}

template <int DIM, typename T, typename Weights, typename Waves>
inline void make_head(const device T* from, device T* to, Steps<Weights, Waves> steps, uint lane) {
  float factor = 1.0f;
  if (steps.eps >= 0.0f) {
    float squares = 0.0f;
    for (int i = int(lane); i < DIM; i += 32) squares += float(from[i]) * float(from[i]);
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

//: kernel append_rows(queries, keys, values, query_weights, key_weights, waves, old_keys, old_values, entries, numbers,
//:                    settings) -> out, new_keys, new_values
//: threads (32 * heads to make, rounded up to 128, 1, 1), groups of (128, 1, 1)
typedef Steps<decltype(&query_weights[0]), decltype(&waves[0])> QuerySteps;
typedef Steps<decltype(&key_weights[0]), decltype(&waves[0])> KeySteps;
const uint lane = thread_index_in_simdgroup;
const int heads = numbers[0], kv_heads = numbers[1], pairs = numbers[5], rows = numbers[6], length = numbers[7];
const int sides = numbers[8] * kv_heads * length;  // heads of all entries' keys, and as many of their values
const int number = int(thread_position_in_grid.x / 32);

if (number < rows * heads) {
  const int row = number / heads;
  const QuerySteps steps = {&query_weights[0], settings[0], &waves[0] + row * 2 * pairs, pairs};
  const device T* from = queries + size_t(row) * queries_shape[1] + numbers[2] + number % heads * KEY_DIM;
  make_head<KEY_DIM>(from, out + size_t(number) * KEY_DIM, steps, lane);
} else if (number < rows * heads + 2 * sides) {
  const bool of_keys = number - rows * heads < sides;
  const int to = of_keys ? number - rows * heads : number - rows * heads - sides;
  const int place = to % length, head = to / length % kv_heads;
  const device int* entry = entries + 4 * (to / (length * kv_heads));
  const int kept = entry[1], row = entry[2] + place - kept;
  const bool is_new = place >= kept && place < kept + entry[3];
  const size_t old = size_t(entry[0] * kv_heads + head) * old_keys_shape[2] + place;
  if (of_keys && is_new) {
    const KeySteps steps = {&key_weights[0], settings[1], &waves[0] + row * 2 * pairs, pairs};
    const device T* from = keys + size_t(row) * keys_shape[1] + numbers[3] + head * KEY_DIM;
    make_head<KEY_DIM>(from, new_keys + size_t(to) * KEY_DIM, steps, lane);
  } else if (of_keys) {
    copy_head<KEY_DIM>(old_keys + old * KEY_DIM, place < kept, new_keys + size_t(to) * KEY_DIM, lane);
  } else {
    const device T* from = is_new ? values + size_t(row) * values_shape[1] + numbers[4] + head * VALUE_DIM : old_values + old * VALUE_DIM;
    copy_head<VALUE_DIM>(from, is_new || place < kept, new_values + size_t(to) * VALUE_DIM, lane);
  }
}
