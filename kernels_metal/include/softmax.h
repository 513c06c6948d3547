// Softmax over keys that arrive a page at a time, and over answers of parts of the keys, in float32.
//
// `kNothing` is the maximum of no scores at all. It is finite, because a difference of infinities is not a number.
#pragma once

constant constexpr float kNothing = -1e30f;

// The score of a raw product of query and key: scaled, and capped if `softcap` is not 0.
inline float score_of(float product, float scale, float softcap) {
  const float x = product * scale;
  return softcap > 0.0f ? softcap * precise::tanh(x / softcap) : x;
}

// e^x for x <= 0. The difference of two scores is small where the weight is large: it is changed to another base, not the scores.
inline float exponential(float x) { return fast::exp2(x * 1.44269504088896340736f); }

// The maximum and the sum of weights of one query so far. A lane adds up its own tokens only; `maximum` is common to all.
struct OnlineSoftmax {
  float maximum;
  float sum;
};

inline OnlineSoftmax empty_softmax() {
  OnlineSoftmax s;
  s.maximum = kNothing;
  s.sum = 0.0f;
  return s;
}

// Takes in scores whose maximum over all lanes is `maximum`; returns what everything added up before has to be multiplied by.
inline float raise_maximum(thread OnlineSoftmax& s, float maximum) {
  const float highest = max(s.maximum, maximum);
  const float shrink = exponential(s.maximum - highest);
  s.maximum = highest;
  s.sum *= shrink;
  return shrink;
}

// The weight of a score, added to the sum. What a query may not see weighs exactly nothing.
inline float weight_of(thread OnlineSoftmax& s, float score, bool visible) {
  const float weight = visible ? exponential(score - s.maximum) : 0.0f;
  s.sum += weight;
  return weight;
}
