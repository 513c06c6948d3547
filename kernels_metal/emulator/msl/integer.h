// Functions of Metal's <metal_integer>.
#pragma once

namespace metal {

template <typename T>
inline T popcount(T x) {
  return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T)))));
}
template <typename T>
inline T clz(T x) {
  constexpr int bits = 8 * sizeof(T);
  ulong u = ulong(x) & (~0ul >> (64 - bits));
  return T(u ? __builtin_clzl(u) - (64 - bits) : bits);
}
template <typename T>
inline T ctz(T x) {
  constexpr int bits = 8 * sizeof(T);
  ulong u = ulong(x) & (~0ul >> (64 - bits));
  return T(u ? __builtin_ctzl(u) : bits);
}
template <typename T>
inline T extract_bits(T x, uint offset, uint bits) {
  constexpr uint width = 8 * sizeof(T);
  return bits == 0 ? T(0) : T(T(x << (width - bits - offset)) >> (width - bits));
}
template <typename T>
inline T insert_bits(T base, T insert, uint offset, uint bits) {
  T mask = bits >= 8 * sizeof(T) ? T(~T(0)) : T(((T(1) << bits) - T(1)) << offset);
  return T((base & ~mask) | ((insert << offset) & mask));
}
template <typename T>
inline T reverse_bits(T x) {
  T r = 0;
  for (uint i = 0; i < 8 * sizeof(T); i++) r |= T((x >> i) & T(1)) << (8 * sizeof(T) - 1 - i);
  return r;
}
template <typename T>
inline T rotate(T x, T n) {
  constexpr T width = 8 * sizeof(T);
  n %= width;
  return n ? T((x << n) | (x >> (width - n))) : x;
}
inline uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }
inline int mulhi(int a, int b) { return int(long(a) * b >> 32); }
template <typename T>
inline T absdiff(T a, T b) {
  return a < b ? T(b - a) : T(a - b);
}
template <typename T>
inline T mul24(T a, T b) {
  return a * b;
}

}  // namespace metal
