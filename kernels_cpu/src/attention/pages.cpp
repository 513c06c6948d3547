#include "attention/pages.h"

#include <algorithm>

#include "memory/scratch.h"

namespace mlxinfer::cpu {

Page PageStore::at(const PagePool& pool, const PageForm& what, int64_t page, int64_t head) const {
  const int64_t index = head * pool.count + page;
  return {pool.data + index * what.bytes(), what.has_codes() ? pool.scales + index * what.scale_bytes() : nullptr, &what};
}

// The i-th page that a segment fills, sealed.
Page PageStore::filled_page(const PlanSegment& segment, int64_t i, int64_t head) const {
  if (!keeps_first) {
    return at(filled, form, segment.full_page + i, head);
  }
  if (segment.fills_first() && i == 0) {
    return at(filled_first, raw, segment.first_full_page, head);
  }
  return at(filled, form, segment.full_page - segment.first_full_page + i - (segment.fills_first() ? 1 : 0), head);
}

Page PageStore::before(const PlanSegment& segment, int64_t page, int64_t head) const {
  const int64_t behind = page - segment.end_page();
  if (behind >= 0) {
    return filled_page(segment, behind, head);
  }
  const int64_t id = segment.pages[static_cast<size_t>(page - segment.first_page)];
  return id < 0 ? at(first, raw, ~id, head) : at(sealed, form, id, head);
}

Page PageStore::own(const PlanSegment& segment, int64_t page, int64_t head) const {
  const int64_t i = page - segment.end_page();
  const Page page_sealed = filled_page(segment, i, head);
  return page_sealed.form->has_codes() ? at(filled_raw, raw, segment.full_page + i, head) : page_sealed;
}

int64_t PageStore::parts(const PlanSegment& segment) {
  return std::max<int64_t>(segment.filled(), 1);
}

void PageStore::append(const PlanSegment& segment, int64_t head, int64_t part, const Heads& rows) const {
  const int64_t filled_pages = segment.filled(), offset = segment.past % kPageTokens;
  if (part < filled_pages) {
    fill(segment, part, head, rows);
  }
  if (part == 0) { // after what the open page had has gone to the first full one
    const int64_t behind = filled_pages * kPageTokens - offset; // rows that have gone to full pages
    const int64_t begin = filled_pages == 0 ? 0 : behind, at = filled_pages == 0 ? offset : 0;
    put(rows, segment.start + begin, segment.count - begin, head, open_page(segment.slot, head) + at * dim * item());
  }
}

// The i-th page that a segment fills.
void PageStore::fill(const PlanSegment& segment, int64_t i, int64_t head, const Heads& rows) const {
  const Page target = own(segment, segment.end_page() + i, head);
  const int64_t offset = segment.past % kPageTokens, there = i == 0 ? offset : 0, from = segment.start + i * kPageTokens - offset + there;
  static thread_local Scratch tokens_scratch, turned_scratch;
  char* tokens = keys ? reinterpret_cast<char*>(tokens_scratch.take(static_cast<size_t>(raw.bytes()))) : target.data;
  std::copy_n(open_page(segment.slot, head), there * dim * item(), tokens);
  put(rows, from, kPageTokens - there, head, tokens + there * dim * item());
  if (keys && raw.form == 0) {
    page_kernels().turn[0](tokens, kPageTokens, dim, reinterpret_cast<float*>(target.data));
  } else if (keys) {
    float* turned = turned_scratch.floats(kPageTokens * dim);
    page_kernels().turn[raw.form](tokens, kPageTokens, dim, turned);
    head_kernels().convert[0][raw.form](turned, kPageTokens * dim, target.data);
  }
  const Page page_sealed = filled_page(segment, i, head);
  if (page_sealed.form->has_codes()) {
    seal_kernels().seal[raw.form](target.data, form, page_sealed.data, page_sealed.scales);
  }
}

void PageStore::put(const Heads& rows, int64_t from, int64_t count, int64_t head, char* to) const {
  static thread_local Scratch scratch;
  float* prepared = scratch.floats(dim);
  for (int64_t row = from; row < from + count; ++row, to += dim * item()) {
    if (rows.is_plain()) {
      head_kernels().convert[rows.dtype][raw.form](rows.at(row, head), dim, to);
    } else {
      rows.prepare(row, head, 1.0f, prepared);
      head_kernels().convert[0][raw.form](prepared, dim, to);
    }
  }
}

} // namespace mlxinfer::cpu
