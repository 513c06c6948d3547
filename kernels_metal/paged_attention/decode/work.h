// Decode attention: what a threadgroup has to do, and where everything is.
#pragma once
#include "paged_attention/decode/shape.h"
#include "include/softmax.h"

// A run of pages of one sequence.
struct Item {
  int slot;    // of the open page
  int row;     // of the first query row
  int count;   // of query rows
  int past;    // position of the first row
  int oldest;  // first position that the first row sees; each further row begins one position later
  int begin, end;  // pages; the page of the rows themselves is the open one
  int table;   // where page 0 would be in the table
  int out;     // row of the first answer
  int kept;    // rows of the open page that lie there; the others are recent ones
  int recent;  // entry of these
};

inline Item item_at(const device int* work, uint index) {
  const device int* at = work + index * 11;
  Item item;
  item.slot = at[0];
  item.row = at[1];
  item.count = at[2];
  item.past = at[3];
  item.oldest = at[4];
  item.begin = at[5];
  item.end = at[6];
  item.table = at[7];
  item.out = at[8];
  item.kept = at[9];
  item.recent = at[10];
  return item;
}

// The cache of one KV head: the bytes of its pages, one page behind another.
template <typename T>
struct Pages {
  const device uchar* keys;
  const device half* key_scales;
  const device uchar* values;
  const device half* value_scales;
  const device uchar* first_keys;
  const device uchar* first_values;
  OpenRows open_keys;
  OpenRows open_values;
};

// Who this thread is, and its threadgroup's memory.
struct Place {
  uint lane, simdgroup, index;
  threadgroup uint* stage;          // shared: a part of a page
  threadgroup uint* key_scales;     // shared: of the page
  threadgroup uint* value_scales;   // of this simdgroup's page
  threadgroup float* weights;       // of this simdgroup's queries, [token][query]
};

// What a simdgroup knows of its queries after some pages.
template <typename D>
struct State {
  OnlineSoftmax softmax[D::QUERIES];
  float answers[D::QUERIES * D::RUNS * D::VALUE_RUN];  // a lane's channels, from the tokens that it has read
  float biases[D::QUERIES * D::GROUPS];                // sum of weight * bias of V, from the tokens whose weights the lane makes
};
