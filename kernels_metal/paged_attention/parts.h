// A part of an answer: what a run of pages gives, divided by its sum of weights, in the dtype of answers, and after it the logarithm of that
// sum in float32, which takes the place of one or two numbers.
#pragma once

template <typename T>
struct PartLog {
  static constexpr constant int size = int(sizeof(float) / sizeof(T));
};

template <int DIM, typename T>
inline float part_log(const device T* part) {
  return *(const device float*)(part + DIM);
}
