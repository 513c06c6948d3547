// New rows of a step on their way into the cache: biases, norms and rotation of heads, and the newest rows of open pages together with the old ones.
//
// A simdgroup makes one head of one row: of the queries, which the attention reads next, or of the recent keys or values, `length` rows for
// each entry and KV head. `paged_attention_decode` does the same itself where it can; this is for steps with more rows than that.
#include "append_rows/rows.h"

//: kernel append_rows(queries, keys, values, biases, query_weights, key_weights, waves, old_keys, old_values, entries, numbers,
//:                    settings) -> out, new_keys, new_values
//: threads (32 * heads to make, rounded up to 128, 1, 1), groups of (128, 1, 1)
typedef Steps<decltype(&biases[0]), decltype(&query_weights[0]), decltype(&waves[0])> QuerySteps;
typedef Steps<decltype(&biases[0]), decltype(&key_weights[0]), decltype(&waves[0])> KeySteps;
const uint lane = thread_index_in_simdgroup;
const int heads = numbers[0], kv_heads = numbers[1], pairs = numbers[5], rows = numbers[6], length = numbers[7];
const int sides = numbers[8] * kv_heads * length;  // heads of all entries' keys, and as many of their values
const int number = int(thread_position_in_grid.x / 32);
const bool has_bias = settings[2] != 0.0f;  // `biases`: of all query heads, all key heads, all value heads
const int key_bias = heads * KEY_DIM, value_bias = key_bias + kv_heads * KEY_DIM;

if (number < rows * heads) {
  const int row = number / heads;
  const QuerySteps steps = {
      &biases[0] + number % heads * KEY_DIM, has_bias, &query_weights[0], settings[0], &waves[0] + row * 2 * pairs, pairs, true};
  const device T* from = queries + size_t(row) * queries_shape[1] + numbers[2] + number % heads * KEY_DIM;
  make_head<KEY_DIM>(from, out + size_t(number) * KEY_DIM, steps, lane);
} else if (number < rows * heads + 2 * sides) {
  const bool of_keys = number - rows * heads < sides;
  const int to = of_keys ? number - rows * heads : number - rows * heads - sides;
  const int place = to % length, head = to / length % kv_heads, entry = to / (length * kv_heads);
  const KeySteps steps = {&biases[0] + key_bias, has_bias, &key_weights[0], settings[1], &waves[0], pairs, true};
  const KeySteps of_values = {&biases[0] + value_bias, has_bias, &key_weights[0], settings[3], &waves[0], 0, false};
  const RecentRows<T> of_k = {keys + numbers[3], int(keys_shape[1]), old_keys, int(old_keys_shape[2]), new_keys, length};
  const RecentRows<T> of_v = {values + numbers[4], int(values_shape[1]), old_values, int(old_keys_shape[2]), new_values, length};
  if (of_keys) {
    make_recent<KEY_DIM>(of_k, steps, entries + 4 * entry, entry, place, head, kv_heads, lane);
  } else {
    make_recent<VALUE_DIM>(of_v, of_values, entries + 4 * entry, entry, place, head, kv_heads, lane);
  }
}
