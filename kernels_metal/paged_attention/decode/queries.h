// Decode attention: where the queries are read from.
#pragma once
#include "append_rows/rows.h"
#include "paged_attention/decode/work.h"

// Queries in threadgroup memory, [query][channel], or, where there is no room, in device memory.
template <typename T>
struct StagedQueries {
  const threadgroup T* start;  // of this simdgroup's first query
  int last;                    // the last query that there is, counted from there
};

template <typename T>
struct DeviceQueries {
  const device T* start;  // of the first row and the first head
  uint row;               // elements from row to row
  int first, last;        // this simdgroup's first query, and the last that there is
};

// Queries of a tile beyond the last one are computed as if they were the last, and not stored.

template <typename D>
inline float query_at(StagedQueries<typename D::T> queries, int query, int channel) {
  return float(queries.start[min(query, queries.last) * D::KEY_DIM + channel]);
}

template <typename D>
inline float query_at(DeviceQueries<typename D::T> queries, int query, int channel) {
  const int i = min(queries.first + query, queries.last);
  return float(queries.start[uint(i / D::HEADS) * queries.row + uint(i % D::HEADS * D::KEY_DIM + channel)]);
}

// Tells at compile time whether queries are copied to threadgroup memory.
template <bool STAGED>
struct Staging {};

// Queries as they are, or as projections have them, with their bias, norm and rotation still to come (`makes`); `steps.waves` are those of
// the item's first row, `steps.bias` those of the first head.
template <typename D, typename T, typename Steps>
inline StagedQueries<T> queries_of(Staging<true>, DeviceQueries<T> queries, bool makes, Steps steps, threadgroup T* room, Place place) {
  if (makes) {
    const auto waves = steps.waves;
    const auto bias = steps.bias;
    for (int query = int(place.simdgroup); query <= queries.last; query += D::SIMDGROUPS) {
      const int row = query / D::HEADS;
      const int offset = query % D::HEADS * D::KEY_DIM;
      steps.waves = waves + row * 2 * steps.pairs;
      steps.bias = bias + offset;
      make_head<D::KEY_DIM>(queries.start + uint(row) * queries.row + offset, room + query * D::KEY_DIM, steps, place.lane);
    }
  } else {
    for (int i = int(place.index); i < (queries.last + 1) * D::KEY_DIM; i += 32 * D::SIMDGROUPS) {
      const int query = i / D::KEY_DIM;
      room[i] = queries.start[uint(query / D::HEADS) * queries.row + uint(query % D::HEADS * D::KEY_DIM + i % D::KEY_DIM)];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  StagedQueries<T> staged;
  staged.start = room + queries.first * D::KEY_DIM;
  staged.last = queries.last - queries.first;
  return staged;
}

template <typename D, typename T, typename Steps>
inline DeviceQueries<T> queries_of(Staging<false>, DeviceQueries<T> queries, bool makes, Steps steps, threadgroup T* room, Place place) {
  return queries;
}
