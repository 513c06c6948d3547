#pragma once

#include <cstdint>

#include "attention/form.h"
#include "attention/heads.h"
#include "attention/plan.h"
#include "attention/tile.h"

namespace mlxinfer::cpu {

// Pages of all heads, `[kv_heads][count]`, and the scales of those that are codes.
struct PagePool {
  char* data = nullptr;
  char* scales = nullptr;
  int64_t count = 0;
};

// One head's page.
struct Page {
  char* data;
  char* scales; // null: there are none
  const PageForm* form;
};

// Keys or values of a layer. What a step's queries see: their own page as it came, which is "raw", and the ones before it sealed.
struct PageStore {
  bool keys;
  int64_t kv_heads, dim;
  PageForm form; // of sealed pages
  PageForm raw; // of raw pages that are full: sealed without codes
  PagePool sealed, first; // that earlier steps sealed; `first` has first pages of sequences, raw
  char* open; // [slots][kv_heads][kPageTokens][dim], raw
  bool keeps_first; // whether first pages that become full go to filled_first
  PagePool filled, filled_first; // what this step seals
  PagePool filled_raw; // all pages that it fills; needed if they are to become codes

  int64_t item() const { // bytes of a raw number
    return form_bytes(raw.form, 1);
  }
  Page before(const PlanSegment& segment, int64_t page, int64_t head) const; // as queries in later pages see it
  Page own(const PlanSegment& segment, int64_t page, int64_t head) const; // as its own queries see it; only if it is full after this step
  char* open_page(int64_t slot, int64_t head) const {
    return open + (slot * kv_heads + head) * raw.bytes();
  }
  // Puts a segment's rows of one head where they belong, and seals what becomes full. `part` 0 to parts(segment) - 1, in any order.
  void append(const PlanSegment& segment, int64_t head, int64_t part, const Heads& rows) const;
  static int64_t parts(const PlanSegment& segment);

 private:
  Page at(const PagePool& pool, const PageForm& what, int64_t page, int64_t head) const;
  Page filled_page(const PlanSegment& segment, int64_t i, int64_t head) const;
  void put(const Heads& rows, int64_t from, int64_t count, int64_t head, char* to) const;
  void fill(const PlanSegment& segment, int64_t i, int64_t head, const Heads& rows) const;
};

} // namespace mlxinfer::cpu
