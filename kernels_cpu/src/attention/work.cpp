#include "attention/work.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "memory/scratch.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kTileRows = 96; // of a KV head's queries: few enough to stay in the cache beside a page
constexpr int64_t kAppendElements = 16384; // some 5 us of work

// Pages are summed up in groups and the groups' results added in order, so that a row's result does not depend on who computed
// which of its groups.
constexpr int64_t kGroupPages = 4;
constexpr int64_t kUnitsPerThread = 4; // below that, groups of one tile are computed side by side
constexpr int64_t kMostPartialFloats = 4 << 20;

int64_t rounded(int64_t size, int64_t to) {
  return (size + to - 1) / to * to;
}

// The rows of one KV head and of tokens [begin, end) of a segment.
struct Tile {
  const PlanSegment* segment;
  int64_t head, begin, end;
  int64_t first_group, last_group; // of the pages that it sees
};

// Groups of a tile that one thread computes, into `partial` or, if that is negative, straight to the output.
struct Unit {
  int64_t tile, first_group, last_group, partial;
};

class Run {
 public:
  explicit Run(const AttentionWork& work);
  void operator()();

 private:
  void lay_out();
  void compute(const Unit& unit) const;
  void add_group(const QueryTile& queries, const Tile& tile, int64_t group, const Partial& into, float* keys, float* values) const;
  void finish(const Tile& tile, const Partial& result) const;
  void merge(const Tile& tile, int64_t first_partial) const;

  int64_t rows(const Tile& tile) const {
    return (tile.end - tile.begin) * work_.heads_per_kv;
  }
  Partial partial_at(float* memory) const {
    return {memory, memory + most_rows_ * width_, memory + most_rows_ * (width_ + 1)};
  }
  int64_t partial_floats() const {
    return rounded(most_rows_ * (width_ + 2), 16);
  }

  const AttentionWork& work_;
  const AttentionKernels& kernels_;
  const PageKernels& pages_;
  int64_t width_; // of a row of output, in whole vectors
  int64_t most_rows_ = 0; // in a tile
  std::vector<Tile> tiles_;
  std::vector<Unit> units_;
  std::vector<int64_t> split_tiles_; // computed by several units
  float* partials_ = nullptr;
};

Run::Run(const AttentionWork& work)
    : work_(work), kernels_(attention_kernels()), pages_(page_kernels()), width_(rounded(work.values.dim, kernels_.width)) {}

void Run::lay_out() {
  const auto& plan = *work_.plan;
  int64_t tokens = std::max<int64_t>(kTileRows / work_.heads_per_kv, 1), partials = 0;
  for (const auto& s : plan.segments) {
    for (int64_t end = s.count; end > 0; end -= std::min(end, tokens)) { // the longest work first
      int64_t begin = std::max<int64_t>(end - tokens, 0), oldest = std::max<int64_t>(s.past + begin - plan.window + 1, 0);
      int64_t first = oldest / kPageTokens / kGroupPages, last = (s.past + end - 1) / kPageTokens / kGroupPages;
      for (int64_t head = 0; head < work_.keys.kv_heads; ++head) {
        tiles_.push_back({&s, head, begin, end, first, last});
        partials += last - first + 1;
      }
      most_rows_ = std::max(most_rows_, (end - begin) * work_.heads_per_kv);
    }
  }
  bool split = thread_count() > 1 && static_cast<int64_t>(tiles_.size()) < kUnitsPerThread * thread_count() &&
      partials * partial_floats() <= kMostPartialFloats;
  int64_t next = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(tiles_.size()); ++i) {
    const auto& tile = tiles_[static_cast<size_t>(i)];
    if (!split || tile.first_group == tile.last_group) {
      units_.push_back({i, tile.first_group, tile.last_group, -1});
      continue;
    }
    split_tiles_.push_back(i);
    for (int64_t group = tile.first_group; group <= tile.last_group; ++group) {
      units_.push_back({i, group, group, next++});
    }
  }
  static thread_local Scratch scratch;
  partials_ = scratch.floats(next * partial_floats());
}

void Run::operator()() {
  lay_out();
  parallel_for(units_.size(), 1, [this](size_t begin, size_t end) {
    for (; begin < end; ++begin) {
      compute(units_[begin]);
    }
  });
  int64_t first_partial = 0;
  for (int64_t i : split_tiles_) {
    const auto& tile = tiles_[static_cast<size_t>(i)];
    merge(tile, first_partial);
    first_partial += tile.last_group - tile.first_group + 1;
  }
}

void Run::compute(const Unit& unit) const {
  const Tile& tile = tiles_[static_cast<size_t>(unit.tile)];
  const int64_t dim = work_.keys.dim;
  static thread_local Scratch scratch;
  int64_t query_floats = rounded(most_rows_ * dim, 16);
  float* memory = scratch.floats(query_floats + dim * kPageTokens + kPageTokens * width_ + 2 * partial_floats());
  float *queries = memory, *keys = queries + query_floats, *values = keys + dim * kPageTokens;
  Partial result = partial_at(values + kPageTokens * width_), other = partial_at(values + kPageTokens * width_ + partial_floats());
  if (unit.partial >= 0) {
    result = partial_at(partials_ + unit.partial * partial_floats());
  }
  const int64_t group = work_.heads_per_kv;
  for (int64_t row = 0; row < rows(tile); ++row) {
    work_.queries.prepare(tile.segment->start + tile.begin + row / group, tile.head * group + row % group, work_.scale, queries + row * dim);
  }
  QueryTile query_tile{queries, rows(tile), group, tile.segment->past + tile.begin, dim, width_, work_.plan->window, work_.softcap};
  for (int64_t pages = unit.first_group; pages <= unit.last_group; ++pages) {
    add_group(query_tile, tile, pages, pages == unit.first_group ? result : other, keys, values);
    if (pages != unit.first_group) {
      kernels_.merge(result, other, rows(tile), width_);
    }
  }
  if (unit.partial < 0) {
    finish(tile, result);
  }
}

void Run::add_group(const QueryTile& queries, const Tile& tile, int64_t group, const Partial& into, float* keys, float* values) const {
  std::fill_n(into.out, queries.rows * width_, 0.0f);
  std::fill_n(into.max, queries.rows, -std::numeric_limits<float>::infinity());
  std::fill_n(into.sum, queries.rows, 0.0f);
  const auto& segment = *tile.segment;
  const int64_t last_position = segment.past + tile.end - 1;
  const int64_t oldest = std::max<int64_t>(queries.first - work_.plan->window + 1, 0);
  const int64_t first = std::max(group * kGroupPages, oldest / kPageTokens);
  const int64_t last = std::min((group + 1) * kGroupPages - 1, last_position / kPageTokens);
  const bool in_place = work_.values.dtype == 0 && work_.values.dim == width_;
  for (int64_t page = first; page <= last; ++page) {
    const int64_t tokens = std::min<int64_t>(last_position + 1 - page * kPageTokens, kPageTokens);
    const char* stored = work_.values.page(segment, page, tile.head);
    Soon soon{stored, stored, 0, tokens * work_.values.dim * work_.values.item_size};
    if (page < last) {
      soon.keys = work_.keys.page(segment, page + 1, tile.head);
      soon.key_bytes = work_.keys.page_bytes();
    }
    pages_.keys[work_.keys.dtype](work_.keys.page(segment, page, tile.head), tokens, work_.keys.dim, keys, soon);
    if (!in_place) {
      pages_.values[work_.values.dtype](stored, tokens, work_.values.dim, width_, values);
    }
    const float* from = in_place ? reinterpret_cast<const float*>(stored) : values;
    kernels_.add_page(queries, {keys, from, width_, page * kPageTokens, tokens}, into);
  }
}

void Run::finish(const Tile& tile, const Partial& result) const {
  const int64_t group = work_.heads_per_kv, heads = group * work_.keys.kv_heads, dim = work_.values.dim;
  for (int64_t row = 0; row < rows(tile); ++row) {
    int64_t token = tile.segment->start + tile.begin + row / group, head = tile.head * group + row % group;
    const float* sink = work_.sinks == nullptr ? nullptr : work_.sinks + head;
    char* out = work_.out + (token * heads + head) * dim * work_.out_item_size;
    kernels_.finish[work_.queries.dtype](result.out + row * width_, result.max[row], result.sum[row], sink, out, dim);
  }
}

void Run::merge(const Tile& tile, int64_t first_partial) const {
  Partial result = partial_at(partials_ + first_partial * partial_floats());
  for (int64_t group = 1; group <= tile.last_group - tile.first_group; ++group) {
    kernels_.merge(result, partial_at(partials_ + (first_partial + group) * partial_floats()), rows(tile), width_);
  }
  finish(tile, result);
}

} // namespace

const char* PageStore::page(const PlanSegment& segment, int64_t page, int64_t head) const {
  const int64_t behind = page - segment.end_page();
  if (behind < 0) {
    int64_t id = segment.pages[static_cast<size_t>(page - segment.first_page)];
    return sealed + (head * sealed_pages + id) * page_bytes();
  }
  return behind < segment.filled() ? full_page(segment.full_page + behind, head) : open_page(segment.slot, head);
}

void PageStore::append(const PlanSegment& segment, int64_t head, const Heads& rows) const {
  const int64_t offset = segment.past - segment.end_page() * kPageTokens, filled = segment.filled(), row_bytes = dim * item_size;
  char* open = open_page(segment.slot, head);
  if (filled > 0) {
    std::copy_n(open, offset * row_bytes, full_page(segment.full_page, head));
  }
  static thread_local Scratch scratch;
  float* prepared = scratch.floats(dim);
  for (int64_t i = 0; i < segment.count; ++i) {
    const int64_t page = (offset + i) / kPageTokens, row = segment.start + i;
    char* to = (page < filled ? full_page(segment.full_page + page, head) : open) + (offset + i) % kPageTokens * row_bytes;
    if (rows.is_plain()) {
      head_kernels().convert[rows.dtype][dtype](rows.at(row, head), dim, to);
    } else {
      rows.prepare(row, head, 1.0f, prepared);
      head_kernels().convert[0][dtype](prepared, dim, to);
    }
  }
}

void AttentionWork::run() const {
  const auto& segments = plan->segments;
  const int64_t heads = keys.kv_heads;
  const int64_t each = std::max<int64_t>(plan->rows * (keys.dim + values.dim) / static_cast<int64_t>(segments.size()), 1);
  parallel_for(segments.size() * static_cast<size_t>(heads), std::max<int64_t>(kAppendElements / each, 1), [&](size_t begin, size_t end) {
    for (; begin < end; ++begin) {
      const auto& segment = segments[begin / static_cast<size_t>(heads)];
      int64_t head = static_cast<int64_t>(begin) % heads;
      keys.append(segment, head, new_keys);
      values.append(segment, head, new_values);
    }
  });
  Run(*this)();
}

} // namespace mlxinfer::cpu
