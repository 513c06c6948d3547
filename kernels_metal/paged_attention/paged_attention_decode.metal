// Attention of 1 to 8 query rows per sequence to the pages of its cache. README.md has the tile, the maths and the bytes.
//
// A threadgroup computes one work item (`Item`, made by plan.py) for one KV head: a run of pages of one sequence, for all query
// heads of that KV head and all rows of the sequence. A query is one pair of row and head: query i of an item is head i % HEADS
// of row i / HEADS. A simdgroup holds the answers of QUERIES queries in registers.
//   SHARED = false: those are all. Every simdgroup takes pages of its own, straight from device memory, and the answers of the
//                   simdgroups are merged at the end.
//   SHARED = true:  there are more. All simdgroups work on the same page, each for queries of its own, and read it from
//                   threadgroup memory, where they have put it together, part by part: it still leaves device memory once.
#include "paged_attention/decode/append.h"
#include "paged_attention/decode/keys.h"
#include "paged_attention/decode/values.h"
#include "paged_attention/decode/answers.h"

// One page, of one of three kinds: open, kept as it is (`~id` of the small pool), sealed.
template <typename D, typename Queries>
inline void attend_page(Pages<typename D::T> pages, Item item, int page, int id, Queries queries, int first_query, float scale,
                        float softcap, Place place, thread State<D>& state) {
  constexpr int keys = KeyRows<D, D::K_BITS>::bytes * D::KEY_DIM, plain_keys = KeyRows<D, 16>::bytes * D::KEY_DIM;
  constexpr int values = ValueRows<D, D::V_BITS>::bytes * 64, plain_values = ValueRows<D, 16>::bytes * 64;
  const bool active = first_query < item.count * D::HEADS;
  float products[D::QUERIES * D::KEY_RUN];
  UNROLL for (int i = 0; i < D::QUERIES * D::KEY_RUN; ++i) products[i] = 0.0f;
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
  UNROLL for (int i = 0; i < D::QUERIES; ++i) state.softmax[i] = empty_softmax();
  UNROLL for (int i = 0; i < D::QUERIES * D::RUNS * D::VALUE_RUN; ++i) state.answers[i] = 0.0f;
  UNROLL for (int i = 0; i < D::QUERIES * D::GROUPS; ++i) state.biases[i] = 0.0f;
  const int step = D::SHARED ? 1 : D::SIMDGROUPS;
  ROLLED for (int page = item.begin + (D::SHARED ? 0 : int(place.simdgroup)); page < item.end; page += step) {
    const int id = page == item.past / 64 ? 0 : table[item.table + page];
    attend_page<D>(pages, item, page, id, queries, first_query, scale, softcap, place, state);
  }
}

//: kernel paged_attention_decode(queries, keys, values, biases, query_weights, key_weights, waves, sealed_keys, key_scales,
//:                               sealed_values, value_scales, first_keys, first_values, open_keys, open_values, recent_keys, recent_values, entries,
//:                               table, work, numbers, settings, sinks) -> answers, parts, new_keys, new_values
//: threads (32 * SIMDGROUPS, KV heads, work items), groups of (32 * SIMDGROUPS, 1, 1)
typedef Decode<T, K_BITS, V_BITS, KEY_DIM, VALUE_DIM, GROUP, HEADS, QUERIES, KEY_RUN, VALUE_RUN, SIMDGROUPS, SHARED, STAGE> D;
typedef Room<D, STAGED_QUERIES> R;
threadgroup T query_room[R::queries];
threadgroup uint stage[R::stage];
threadgroup uint key_scale_room[R::key_scales];
threadgroup uint value_scale_room[R::value_scales];
threadgroup float floats[R::floats];
threadgroup float softmaxes[R::softmaxes];

Place place;
place.lane = thread_index_in_simdgroup;
place.simdgroup = simdgroup_index_in_threadgroup;
place.index = thread_index_in_threadgroup;
place.stage = stage;
place.key_scales = key_scale_room;
place.value_scales = value_scale_room + (SHARED ? 0 : place.simdgroup * (V_BITS == 16 ? 0 : 64 * D::GROUPS));
place.weights = floats + place.simdgroup * R::weights;

const int head = threadgroup_position_in_grid.y, heads = threadgroups_per_grid.y;
const Item item = item_at(work, threadgroup_position_in_grid.z);
const size_t sealed = size_t(head) * sealed_keys_shape[1], first = size_t(head) * first_keys_shape[1];

const bool appends = numbers[0] == 1;        // otherwise recent rows have the step's own among them
const bool makes_queries = numbers[0] != 0;  // otherwise queries are ready
const int pairs = numbers[7], recent_length = appends ? numbers[9] : numbers[8];
const bool has_bias = settings[6] != 0.0f;  // `biases`: of all query heads, all key heads, all value heads
const int key_bias = heads * HEADS * KEY_DIM, value_bias = key_bias + heads * KEY_DIM;
typedef Steps<decltype(&biases[0]), decltype(&query_weights[0]), decltype(&waves[0])> QuerySteps;
typedef Steps<decltype(&biases[0]), decltype(&key_weights[0]), decltype(&waves[0])> KeySteps;
if (appends) {
  Appending<T, KeySteps> step;
  step.keys = {keys + numbers[4], numbers[3], recent_keys, numbers[8], new_keys, numbers[9]};
  step.values = {values + numbers[6], numbers[5], recent_values, numbers[8], new_values, numbers[9]};
  step.key_steps = {&biases[0] + key_bias, has_bias, &key_weights[0], settings[5], &waves[0], pairs, true};
  step.value_steps = {&biases[0] + value_bias, has_bias, &key_weights[0], settings[7], &waves[0], 0, false};
  step.entries = &entries[0];
  if (item.end > item.past / 64) append_entry<D>(step, item.recent, head, heads, place);
  // Sequences that do not take part in the step keep what they have.
  const int items = int(threadgroups_per_grid.z);
  for (int i = numbers[11] + int(threadgroup_position_in_grid.z); i < numbers[10]; i += items) append_entry<D>(step, i, head, heads, place);
  threadgroup_barrier(mem_flags::mem_device);
}

const size_t open = size_t(item.slot) * heads + head, recent = (size_t(item.recent) * heads + head) * recent_length;
const device T* recent_k = appends ? new_keys : recent_keys;
const device T* recent_v = appends ? new_values : recent_values;
Pages<T> pages;
pages.keys = (const device uchar*)sealed_keys + sealed * (KeyRows<D, K_BITS>::bytes * KEY_DIM);
pages.key_scales = key_scales + (K_BITS == 16 ? 0 : sealed * 2 * KEY_DIM);
pages.values = (const device uchar*)sealed_values + sealed * (ValueRows<D, V_BITS>::bytes * 64);
pages.value_scales = value_scales + (V_BITS == 16 ? 0 : sealed * 128 * D::GROUPS);
pages.first_keys = (const device uchar*)first_keys + first * (KeyRows<D, 16>::bytes * KEY_DIM);
pages.first_values = (const device uchar*)first_values + first * (ValueRows<D, 16>::bytes * 64);
pages.open_keys.page = (const device uchar*)open_keys + open * (64 * KEY_DIM * sizeof(T));
pages.open_keys.recent = (const device uchar*)recent_k + recent * (KEY_DIM * sizeof(T));
pages.open_values.page = (const device uchar*)open_values + open * (64 * VALUE_DIM * sizeof(T));
pages.open_values.recent = (const device uchar*)recent_v + recent * (VALUE_DIM * sizeof(T));
pages.open_keys.kept = pages.open_values.kept = uint(item.kept);
pages.open_keys.stride = KEY_DIM * sizeof(T);
pages.open_values.stride = VALUE_DIM * sizeof(T);

const int first_query = SHARED ? int(place.simdgroup) * QUERIES : 0;
DeviceQueries<T> all;
all.row = uint(numbers[1]);
all.start = queries + size_t(item.row) * all.row + numbers[2] + head * HEADS * KEY_DIM;
all.first = first_query;
all.last = item.count * HEADS - 1;
const QuerySteps query_steps = {
    &biases[0] + head * HEADS * KEY_DIM, has_bias, &query_weights[0], settings[4], &waves[0] + item.row * 2 * pairs, pairs, true};
const auto own = queries_of<D>(Staging<(STAGED_QUERIES > 0)>(), all, makes_queries, query_steps, query_room, place);
State<D> state;
attend_pages<D>(pages, item, table, own, first_query, settings[0], settings[1], place, state);
add_lanes<D>(place, state);

typedef Out<T, decltype(&sinks[0])> Answers;
Answers out;
out.answers = answers;
out.parts = parts;
out.sinks = &sinks[0];
out.has_sinks = settings[2] != 0.0f;
out.divided = settings[3] != 0.0f;
if (place.index == 0 && head == 0 && threadgroup_position_in_grid.z == 0) {  // of what is not wanted there is one element
  if (out.divided) {
    answers[0] = static_cast<T>(0.0f);
  } else {
    parts[0] = static_cast<T>(0.0f);
  }
  if (!appends) {
    new_keys[0] = static_cast<T>(0.0f);
    new_values[0] = static_cast<T>(0.0f);
  }
}
if (SHARED) {
  store_own<D>(out, item, head, heads, first_query, place, state);
} else {
  store_merged<D>(out, item, head, heads, place, floats, softmaxes, state);
}
