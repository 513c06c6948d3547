// q [H, D] T, k and v [S, D] T, one KV head: out [H, D] T. A threadgroup to a query head; each of its G simdgroups takes every G-th key,
// each lane D/32 channels; the simdgroups' softmaxes, each with its own maximum, are put together at the end.
constexpr int OWN = D / 32;
threadgroup float maxima[G];
threadgroup float sums[G];
threadgroup float sides[G * D];
const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y;
const uint keys = k_shape[0];

float query[OWN];
float side[OWN];
for (int i = 0; i < OWN; i++) {
  query[i] = float(q[head * D + lane * OWN + i]) * scale;
  side[i] = 0;
}
float largest = -INFINITY;
float sum = 0;
for (uint key = group; key < keys; key += G) {
  float score = 0;
  for (int i = 0; i < OWN; i++) score += query[i] * float(k[key * D + lane * OWN + i]);
  score = simd_sum(score);
  const float before = largest;
  largest = max(largest, score);
  const float shrink = metal::fast::exp(before - largest);
  const float weight = metal::fast::exp(score - largest);
  sum = sum * shrink + weight;
  for (int i = 0; i < OWN; i++) side[i] = side[i] * shrink + weight * float(v[key * D + lane * OWN + i]);
}
if (lane == 0) {
  maxima[group] = largest;
  sums[group] = sum;
}
for (int i = 0; i < OWN; i++) sides[group * D + lane * OWN + i] = side[i];
threadgroup_barrier(mem_flags::mem_threadgroup);

float most = -INFINITY;
for (int g = 0; g < G; g++) most = max(most, maxima[g]);
float all = 0;
for (int g = 0; g < G; g++) all += sums[g] * metal::fast::exp(maxima[g] - most);
for (uint i = thread_index_in_threadgroup; i < D; i += G * 32) {
  float value = 0;
  for (int g = 0; g < G; g++) value += sides[g * D + i] * metal::fast::exp(maxima[g] - most);
  out[head * D + i] = static_cast<T>(value / all);
}
