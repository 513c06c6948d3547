// Decode attention: the step's own rows on their way into the cache.
#pragma once
#include "append_rows/rows.h"
#include "paged_attention/decode/work.h"

template <typename T, typename KeySteps>
struct Appending {
  RecentRows<T> keys, values;
  KeySteps key_steps, value_steps;
  const device int* entries;  // [entries][4], as `make_recent` takes them
};

// The recent rows of an entry for one KV head, by all simdgroups of a threadgroup. The threadgroup that attends to them reads them where they
// are written, after a barrier for device memory; no other one does.
template <typename D, typename Step>
inline void append_entry(Step step, int entry, int head, int heads, Place place) {
  const int length = step.keys.length;
  for (int i = int(place.simdgroup); i < 2 * length; i += D::SIMDGROUPS) {
    if (i < length) {
      make_recent<D::KEY_DIM>(step.keys, step.key_steps, step.entries + 4 * entry, entry, i, head, heads, place.lane);
    } else {
      make_recent<D::VALUE_DIM>(step.values, step.value_steps, step.entries + 4 * entry, entry, i - length, head, heads, place.lane);
    }
  }
}
