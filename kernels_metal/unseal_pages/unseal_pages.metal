// Pages of a sequence as plain keys and values, one after another: what MLX's own attention reads.
//
// A threadgroup copies the keys or the values of one page and KV head. Pages in a pool are taken apart in threadgroup memory, KEYS tokens at a
// time, so that keys, which lie there channel by channel, are both loaded and stored in runs. Raw pages are copied as they are.
#include "paged_attention_prefill/stage.h"

// Kinds of pages in the table; other numbers mean raw pages.
constant constexpr int kSealed = 0, kFilled = 1, kFirst = 2;

// What is known when the kernel is compiled. Names as in the launcher.
template <typename T_, int KEY_DIM_, int VALUE_DIM_, int K_BITS_, int V_BITS_, int GROUP_, int KEYS_>
struct Unseal {
  typedef T_ T;
  static constexpr constant int KEY_DIM = KEY_DIM_, VALUE_DIM = VALUE_DIM_, K_BITS = K_BITS_, V_BITS = V_BITS_, KEYS = KEYS_;
  static constexpr constant int GROUP = V_BITS_ == 16 ? VALUE_DIM_ : GROUP_;
  static constexpr constant int LINE = (KEY_DIM_ > VALUE_DIM_ ? KEY_DIM_ : VALUE_DIM_) + 8;
};

// KEYS tokens of a page from `first` on.
template <typename U, int K_BITS, int V_BITS, int GROUP, bool OF_KEYS>
inline void take_apart(threadgroup typename U::T* room, Page pool, ulong number, uint first, uint index) {
  const Page page = page_at<typename U::T, U::KEY_DIM, U::VALUE_DIM, K_BITS, V_BITS, GROUP>(pool, number);
  if (OF_KEYS) {
    stage_keys<typename U::T, K_BITS, U::KEY_DIM, U::KEYS, U::LINE>(room, page, first, index, 256);
  } else {
    stage_values<typename U::T, V_BITS, U::VALUE_DIM, GROUP, U::KEYS, U::LINE>(room, page, first, index, 256);
  }
}

template <typename U, bool OF_KEYS>
inline void copy_page(threadgroup typename U::T* room, int kind, Page pool, ulong number, const device typename U::T* raw,
                      device typename U::T* out, uint index) {
  constexpr uint DIM = OF_KEYS ? U::KEY_DIM : U::VALUE_DIM;
  if (kind > kFirst) {
    for (uint i = index; i < 64 * DIM; i += 256) out[i] = raw[i];
    return;
  }
  for (uint first = 0; first < 64; first += U::KEYS) {
    if (kind == kFirst) {
      take_apart<U, 16, 16, U::VALUE_DIM, OF_KEYS>(room, pool, number, first, index);
    } else {
      take_apart<U, U::K_BITS, U::V_BITS, U::GROUP, OF_KEYS>(room, pool, number, first, index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < U::KEYS * DIM; i += 256) out[first * DIM + i] = room[i / DIM * U::LINE + i % DIM];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

//: kernel unseal_pages(sealed_keys, key_scales, sealed_values, value_scales, filled_keys, filled_key_scales, filled_values,
//:                     filled_value_scales, first_keys, first_values, raw_keys, raw_values, table) -> keys, values
//: threads (256 * pages, KV heads, 2), groups of (256, 1, 1)
typedef Unseal<T, KEY_DIM, VALUE_DIM, K_BITS, V_BITS, GROUP, KEYS> U;
threadgroup T room[KEYS * U::LINE];

const uint page = threadgroup_position_in_grid.x, index = thread_index_in_threadgroup;
const ulong head = threadgroup_position_in_grid.y, at = head * threadgroups_per_grid.x + page;
const int kind = table[2 * page], number = table[2 * page + 1];
Page pool = Page{(const device uchar*)sealed_keys, key_scales, (const device uchar*)sealed_values, value_scales};
ulong pages = sealed_keys_shape[1];
if (kind == kFilled) {
  pool = Page{(const device uchar*)filled_keys, filled_key_scales, (const device uchar*)filled_values, filled_value_scales};
  pages = filled_keys_shape[1];
} else if (kind == kFirst) {
  pool = Page{(const device uchar*)first_keys, key_scales, (const device uchar*)first_values, value_scales};
  pages = first_keys_shape[1];
} else if (kind > kFirst) {
  pages = raw_keys_shape[1];
}
const ulong entry = head * pages + number;
if (threadgroup_position_in_grid.z == 0) {
  copy_page<U, true>(room, kind, pool, entry, raw_keys + entry * (64 * KEY_DIM), keys + at * (64 * KEY_DIM), index);
} else {
  copy_page<U, false>(room, kind, pool, entry, raw_values + entry * (64 * VALUE_DIM), values + at * (64 * VALUE_DIM), index);
}
