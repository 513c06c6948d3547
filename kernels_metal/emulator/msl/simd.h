// Barriers and what the 32 lanes of a simdgroup tell one another. All of these wait until every lane has come to the same line.
#pragma once

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

inline void threadgroup_barrier(mem_flags flags, EMU_PLACE) { __emu_barrier(1, uint(flags), file, line); }
inline void simdgroup_barrier(mem_flags flags, EMU_PLACE) { __emu_barrier(0, uint(flags), file, line); }

// Gives what all 32 lanes have passed. It stays valid up to this lane's next exchange.
template <typename T>
EMU_UNTRACED inline const thread T* __exchange(T x, const constant char* file, int line) {
  static_assert(sizeof(T) <= 16, "lanes exchange at most 16 bytes");
  thread T* slots = (thread T*)__emu_slots();
  slots[__emu_lane()] = x;
  __emu_meet(0, sizeof(T), file, line);
  return slots;
}

#define EMU_REDUCTION(NAME, COMBINED)                                 \
  template <typename T>                                               \
  EMU_UNTRACED inline T NAME(T x, EMU_PLACE) {                        \
    const thread T* all = __exchange(x, file, line);                  \
    T v[32];                                                          \
    for (int i = 0; i < 32; i++) v[i] = all[i];                       \
    for (int half_of = 16; half_of; half_of /= 2)                     \
      for (int i = 0; i < half_of; i++) {                             \
        T a = v[i], b = v[i + half_of];                               \
        v[i] = COMBINED;                                              \
      }                                                               \
    return v[0];                                                      \
  }
EMU_REDUCTION(simd_sum, a + b)
EMU_REDUCTION(simd_product, a* b)
EMU_REDUCTION(simd_max, max(a, b))
EMU_REDUCTION(simd_min, min(a, b))
EMU_REDUCTION(simd_and, a& b)
EMU_REDUCTION(simd_or, a | b)
EMU_REDUCTION(simd_xor, a ^ b)
#undef EMU_REDUCTION

#define EMU_EXCHANGE(NAME, PARAMETERS, SOURCE)                        \
  template <typename T>                                               \
  EMU_UNTRACED inline T NAME(T x, PARAMETERS EMU_PLACE) {             \
    const thread T* all = __exchange(x, file, line);                  \
    const uint lane = __emu_lane();                                   \
    return all[SOURCE];                                               \
  }
#define EMU_USHORT(N) ushort N,
EMU_EXCHANGE(simd_shuffle, EMU_USHORT(from), ((void)lane, from & 31))
EMU_EXCHANGE(simd_broadcast, EMU_USHORT(from), ((void)lane, from & 31))
EMU_EXCHANGE(simd_broadcast_first, , ((void)lane, 0))
EMU_EXCHANGE(simd_shuffle_xor, EMU_USHORT(mask), (lane ^ mask) & 31)
EMU_EXCHANGE(simd_shuffle_down, EMU_USHORT(delta), lane + delta < 32 ? lane + delta : lane)
EMU_EXCHANGE(simd_shuffle_up, EMU_USHORT(delta), lane >= delta ? lane - delta : lane)
EMU_EXCHANGE(simd_shuffle_rotate_down, EMU_USHORT(delta), (lane + delta) & 31)
EMU_EXCHANGE(simd_shuffle_rotate_up, EMU_USHORT(delta), (lane - delta) & 31)
EMU_EXCHANGE(quad_shuffle, EMU_USHORT(from), (lane & ~3u) | (from & 3))
EMU_EXCHANGE(quad_broadcast, EMU_USHORT(from), (lane & ~3u) | (from & 3))
EMU_EXCHANGE(quad_shuffle_xor, EMU_USHORT(mask), (lane & ~3u) | ((lane ^ mask) & 3))
#undef EMU_EXCHANGE
#undef EMU_USHORT

template <typename T>
EMU_UNTRACED inline T simd_shuffle_and_fill_down(T x, T filling, ushort delta, EMU_PLACE) {
  const thread T* all = __exchange(x, file, line);
  const T kept = all[(__emu_lane() + delta) & 31];
  const thread T* fill = __exchange(filling, file, line);
  return __emu_lane() + delta < 32 ? kept : fill[(__emu_lane() + delta) & 31];
}
template <typename T>
EMU_UNTRACED inline T simd_shuffle_and_fill_up(T x, T filling, ushort delta, EMU_PLACE) {
  const thread T* all = __exchange(x, file, line);
  const T kept = all[(__emu_lane() - delta) & 31];
  const thread T* fill = __exchange(filling, file, line);
  return __emu_lane() >= delta ? kept : fill[(__emu_lane() - delta) & 31];
}

#define EMU_PREFIX(NAME, START, OP, LAST)                             \
  template <typename T>                                               \
  EMU_UNTRACED inline T NAME(T x, EMU_PLACE) {                        \
    const thread T* all = __exchange(x, file, line);                  \
    T r = T(START);                                                   \
    for (uint i = 0; i LAST __emu_lane(); i++) r = r OP all[i];       \
    return r;                                                         \
  }
EMU_PREFIX(simd_prefix_inclusive_sum, 0, +, <=)
EMU_PREFIX(simd_prefix_exclusive_sum, 0, +, <)
EMU_PREFIX(simd_prefix_inclusive_product, 1, *, <=)
EMU_PREFIX(simd_prefix_exclusive_product, 1, *, <)
#undef EMU_PREFIX

#define EMU_QUAD(NAME, COMBINED)                                      \
  template <typename T>                                               \
  EMU_UNTRACED inline T NAME(T x, EMU_PLACE) {                        \
    const thread T* all = __exchange(x, file, line) + (__emu_lane() & ~3u); \
    T a = all[0];                                                     \
    for (int i = 1; i < 4; i++) {                                     \
      T b = all[i];                                                   \
      a = COMBINED;                                                   \
    }                                                                 \
    return a;                                                         \
  }
EMU_QUAD(quad_sum, a + b)
EMU_QUAD(quad_max, max(a, b))
EMU_QUAD(quad_min, min(a, b))
#undef EMU_QUAD

struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
};
EMU_UNTRACED inline ulong __votes(bool x, const constant char* file, int line) {
  const thread uint* all = __exchange(uint(x), file, line);
  ulong bits = 0;
  for (int i = 0; i < 32; i++) bits |= ulong(all[i] != 0) << i;
  return bits;
}
inline simd_vote simd_ballot(bool x, EMU_PLACE) { return simd_vote{__votes(x, file, line)}; }
inline bool simd_any(bool x, EMU_PLACE) { return __votes(x, file, line) != 0; }
inline bool simd_all(bool x, EMU_PLACE) { return __votes(x, file, line) == 0xffffffffull; }
inline bool simd_is_first() { return __emu_lane() == 0; }

}  // namespace metal
