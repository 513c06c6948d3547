#include "attention/work.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/load.h"
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
  void add_group(const QueryTile& queries, const Tile& tile, const Unit& unit, int64_t group, const Partial& into, const Room& room) const;
  std::pair<const char*, int64_t> keys_at(const Tile& tile, int64_t page) const;
  std::pair<const char*, int64_t> read_after(const Unit& unit) const;
  void finish(const Tile& tile, const Partial& result) const;
  void merge(const Tile& tile, int64_t first_partial) const;

  static int64_t last_position(const Tile& tile) {
    return tile.segment->past + tile.end - 1;
  }
  int64_t first_page(const Tile& tile, int64_t group) const {
    return std::max(group * kGroupPages, std::max<int64_t>(tile.segment->past + tile.begin - work_.plan->window + 1, 0) / kPageTokens);
  }
  static bool is_open(const PlanSegment& segment, int64_t page) {
    return page >= segment.end_page() + segment.filled();
  }
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
  int64_t width_; // of a row of output, in whole vectors
  int64_t most_rows_ = 0; // in a tile
  std::vector<Tile> tiles_;
  std::vector<Unit> units_;
  std::vector<int64_t> split_tiles_; // computed by several units
  float* partials_ = nullptr;
};

Run::Run(const AttentionWork& work)
    : work_(work), kernels_(attention_kernels()), width_(rounded(work.values.dim, kernels_.width)) {}

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
  const int64_t dim = work_.keys.dim, scale_floats = 3 * work_.values.form.groups() * kPageTokens;
  static thread_local Scratch scratch;
  const int64_t query_floats = rounded((most_rows_ + kBlockRows) * dim, 16);
  float* memory = scratch.floats(query_floats + dim * kPageTokens + kPageTokens * width_ + scale_floats + 2 * partial_floats());
  float* queries = memory;
  float *keys = queries + query_floats, *values = keys + dim * kPageTokens;
  const Room room{keys, values, values + kPageTokens * width_, width_};
  Partial result = partial_at(room.value_scales + scale_floats), other = partial_at(room.value_scales + scale_floats + partial_floats());
  if (unit.partial >= 0) {
    result = partial_at(partials_ + unit.partial * partial_floats());
  }
  const int64_t group = work_.heads_per_kv;
  for (int64_t row = 0; row < rows(tile); ++row) {
    work_.queries.prepare(tile.segment->start + tile.begin + row / group, tile.head * group + row % group, work_.scale, queries + row * dim);
  }
  QueryTile query_tile{queries,   queries + most_rows_ * dim, rows(tile), group, tile.segment->past + tile.begin, dim, width_, work_.plan->window,
                       work_.softcap};
  for (int64_t pages = unit.first_group; pages <= unit.last_group; ++pages) {
    add_group(query_tile, tile, unit, pages, pages == unit.first_group ? result : other, room);
    if (pages != unit.first_group) {
      kernels_.merge(result, other, rows(tile), width_);
    }
  }
  if (unit.partial < 0) {
    finish(tile, result);
  }
}

void Run::add_group(const QueryTile& queries, const Tile& tile, const Unit& unit, int64_t group, const Partial& into, const Room& room) const {
  std::fill_n(into.out, queries.rows * width_, 0.0f);
  std::fill_n(into.max, queries.rows, -std::numeric_limits<float>::infinity());
  std::fill_n(into.sum, queries.rows, 0.0f);
  const int64_t first = first_page(tile, group), last = std::min((group + 1) * kGroupPages - 1, last_position(tile) / kPageTokens);
  const auto& segment = *tile.segment;
  auto row_at = [&](int64_t position) { return std::clamp<int64_t>((position - queries.first) * queries.heads_per_kv, 0, queries.rows); };
  for (int64_t page = first; page <= last; ++page) {
    const int64_t tokens = std::min<int64_t>(last_position(tile) + 1 - page * kPageTokens, kPageTokens);
    const int64_t begin = row_at(page * kPageTokens), after = row_at((page + 1) * kPageTokens);
    auto add = [&](PageTile loaded, int64_t from, int64_t to) {
      loaded.first = page * kPageTokens;
      loaded.tokens = tokens;
      loaded.cold = page == first && group == unit.first_group && loaded.keys.data != room.keys;
      std::tie(loaded.next, loaded.next_bytes) = page < last || group < unit.last_group ? keys_at(tile, page + 1) : read_after(unit);
      kernels_.add_page(queries, loaded, into, from, to);
    };
    if (is_open(segment, page)) {
      add(open_tile(work_, segment, tile.head, tokens, room), begin, queries.rows);
      continue;
    }
    const Page keys = work_.keys.before(segment, page, tile.head), values = work_.values.before(segment, page, tile.head);
    const int64_t rest = keys.form->has_codes() || values.form->has_codes() ? after : begin; // its own rows see it as it came
    if (begin < rest) {
      add(full_tile(work_, work_.keys.own(segment, page, tile.head), work_.values.own(segment, page, tile.head), rest - begin, room), begin, rest);
    }
    if (rest < queries.rows) {
      add(full_tile(work_, keys, values, queries.rows - rest, room), rest, queries.rows);
    }
  }
}

// A page's keys and their bytes.
std::pair<const char*, int64_t> Run::keys_at(const Tile& tile, int64_t page) const {
  const auto& segment = *tile.segment;
  if (is_open(segment, page)) {
    return {work_.keys.open_page(segment.slot, tile.head), work_.keys.raw.bytes()};
  }
  return {work_.keys.before(segment, page, tile.head).data, work_.keys.form.bytes()};
}

// The keys that this thread probably reads after a unit, while threads take turns.
std::pair<const char*, int64_t> Run::read_after(const Unit& unit) const {
  const auto next = static_cast<size_t>(&unit - units_.data() + thread_count());
  if (next >= units_.size()) {
    return {nullptr, 0};
  }
  const Tile& tile = tiles_[static_cast<size_t>(units_[next].tile)];
  return keys_at(tile, first_page(tile, units_[next].first_group));
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

// Appends all new rows, by pages that become full.
void append(const AttentionWork& work) {
  struct Part {
    const PlanSegment* segment;
    int64_t index;
  };
  std::vector<Part> parts;
  for (const auto& segment : work.plan->segments) {
    for (int64_t i = 0; i < PageStore::parts(segment); ++i) {
      parts.push_back({&segment, i});
    }
  }
  const int64_t heads = work.keys.kv_heads;
  const int64_t each = std::max<int64_t>(work.plan->rows * (work.keys.dim + work.values.dim) / static_cast<int64_t>(parts.size()), 1);
  parallel_for(parts.size() * static_cast<size_t>(heads), std::max<int64_t>(kAppendElements / each, 1), [&](size_t begin, size_t end) {
    for (; begin < end; ++begin) {
      const auto& [segment, index] = parts[begin / static_cast<size_t>(heads)];
      const int64_t head = static_cast<int64_t>(begin) % heads;
      work.keys.append(*segment, head, index, work.new_keys);
      work.values.append(*segment, head, index, work.new_values);
    }
  });
}

} // namespace

void AttentionWork::run() const {
  static thread_local Scratch key_scratch, value_scratch;
  AttentionWork work = *this;
  auto take = [&](PageStore& store, Scratch& scratch) {
    if (store.form.has_codes() && store.filled_raw.data == nullptr) {
      const int64_t count = plan->full_pages;
      store.filled_raw = {reinterpret_cast<char*>(scratch.take(static_cast<size_t>(store.kv_heads * count * store.raw.bytes()))), nullptr, count};
    }
  };
  take(work.keys, key_scratch);
  take(work.values, value_scratch);
  if (new_keys.data != nullptr) {
    append(work);
  }
  Run attend(work);
  attend();
}

} // namespace mlxinfer::cpu
