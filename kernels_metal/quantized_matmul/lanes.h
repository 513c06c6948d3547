// Arithmetic of a lane that products of all kinds share: numbers of x, sums over lanes, activations.
#pragma once

// Eight numbers of x; zeros, if they are not there.
template <typename T>
inline void octet_of_x(const device T* from, bool there, thread float* numbers) {
  constexpr int bytes = 8 * int(sizeof(T));
  uint words[2 * sizeof(T)];
  const DeviceRows rows = {(const device uchar*)from, 0};
  load_run<bytes, 16>(rows, 0, 0, words);
  UNROLL for (int i = 0; i < int(2 * sizeof(T)); ++i) words[i] = there ? words[i] : 0u;
  UNROLL for (int i = 0; i < 8; ++i) numbers[i] = value_at<T, 16>(words, i);
}

// Adds up over the eight lanes that have the same columns.
inline float sum_of_pieces(float x) {
  x += simd_shuffle_xor(x, 2);
  x += simd_shuffle_xor(x, 4);
  return x + simd_shuffle_xor(x, 16);
}

// silu (1) or the tanh approximation of gelu (2). As 1 + tanh(z) is 2 / (1 + e^(-2 z)), both are a share of x, which overflows nowhere.
template <int GATE>
inline float activated(float x) {
  const float steep = GATE == 1 ? x : 1.59576912160573071f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi)
  return x / (1.0f + precise::exp(-steep));
}
