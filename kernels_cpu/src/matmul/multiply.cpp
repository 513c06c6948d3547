#include "matmul/multiply.h"

#include <algorithm>

#include "matmul/few_rows.h"
#include "matmul/many_rows.h"
#include "matmul/matrix.h"
#include "matmul/prefetch_trial.h"
#include "matmul/tile.h"
#include "memory/scratch.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

// Activations of this size stay in a core's second cache while the panels go by.
constexpr int64_t kChunkBytes = 512 * 1024;
constexpr int64_t kManyRowsBlocks = 24; // that tiles of many rows are multiplied with before the next ones
constexpr int64_t kMostPanelsPerPiece = 16, kPiecesPerThread = 3;
constexpr int64_t kPreparedElements = 2048; // some microseconds of work
constexpr int64_t kLeastAhead = 6144; // bytes, for the memory to answer in time

constexpr int kFewRows = kTileSizes, kManyRows = kTileSizes + 1; // kinds of tiles

// Neighbouring rows of one chunk that are multiplied together: `size` = kTileRows[kind] of them, from kLeastFewRows to kMostFewRows, or the
// rows of ManyRowsKernels.
struct Tile {
  int kind, size;
  int64_t first; // in the chunk's order of rows
  int64_t expert;
};

// The rows of one expert in a chunk, and their tiles.
struct Segment {
  int64_t expert;
  size_t first_tile, last_tile;
};

// Activations of a chunk in the form that the kernels read, rows in the chunk's order.
struct Prepared {
  uint8_t* values; // planes of codes or float32, by tiles
  float* sums; // in float32 products, twice as many: those of the halves of blocks
  float* scales;
  float* half_sums; // nested scales: sums of groups
  int32_t* code_sums; // nested scales: starts
  uint8_t* finite; // [rows]
};

class Run {
 public:
  explicit Run(const Product& product)
      : p_(product),
        planes_(!product.layout.has_integers() ? 0 : product.precision == Precision::int8 ? 1 : product.precision == Precision::int16 ? 2 : 0),
        blocks_(product.layout.blocks()),
        padded_(blocks_ * kBlockColumns),
        item_(item_bytes(product.dtype)),
        code_(static_cast<int>(product.layout.code)),
        nested_(planes_ > 0 && product.layout.scale == Scale::nested),
        group_halves_(has_halves(product.layout.code) ? 2 : 1),
        few_rows_(planes_ == 2 && !nested_ && has_matrix_unit() && few_rows_kernels().panels[code_][0] != nullptr),
        many_rows_(product.layout.is_plain() ? many_rows_kernels().rows : 0),
        on_matrix_unit_(planes_ > 0 && has_matrix_unit() && (nested_ || matrix_kernels().spread[code_] != nullptr)) {}

  void all() {
    order_rows();
    const int64_t unit = many_rows_ > 0 ? many_rows_ : kLargestTile, depth = many_rows_ > 0 ? std::min(blocks_, kManyRowsBlocks) : blocks_;
    const int64_t row_bytes = value_bytes(depth * kBlockColumns) + depth * 16;
    const int64_t most = std::max<int64_t>(kChunkBytes / row_bytes, 4 * kLargestTile) / unit * unit;
    for (first_ = 0; first_ < rows_; first_ += count_) {
      count_ = std::min(most, rows_ - first_);
      cut_tiles();
      prepare();
      const PrefetchTrial trial(count_ == 1 ? p_.layout.panels() * p_.layout.panel_bytes() : 0);
      distance_ = std::min(trial.distance(), p_.layout.panel_bytes());
      run_panels();
    }
  }

 private:
  int64_t value_bytes(int64_t values) const {
    return values * (planes_ == 0 ? 4 : planes_);
  }

  // Rows of one expert become neighbours; those without one are left out.
  void order_rows() {
    rows_ = p_.rows;
    if (p_.experts != nullptr) {
      order_.reserve(static_cast<size_t>(p_.rows));
      for (int64_t i = 0; i < p_.rows; ++i) {
        if (p_.experts[i] >= 0) {
          order_.push_back(i);
        }
      }
      rows_ = static_cast<int64_t>(order_.size());
      std::stable_sort(order_.begin(), order_.end(), [this](int64_t a, int64_t b) { return p_.experts[a] < p_.experts[b]; });
    }
  }

  int64_t row_at(int64_t i) const {
    return order_.empty() ? first_ + i : order_[static_cast<size_t>(first_ + i)];
  }
  int64_t expert_at(int64_t i) const {
    return p_.experts == nullptr ? 0 : std::min<int64_t>(p_.experts[row_at(i)], p_.expert_count - 1);
  }

  void cut_tiles() {
    tiles_.clear();
    segments_.clear();
    for (int64_t i = 0; i < count_;) {
      const int64_t expert = expert_at(i);
      int64_t end = p_.experts == nullptr ? count_ : i + 1;
      while (end < count_ && expert_at(end) == expert) {
        ++end;
      }
      const size_t first_tile = tiles_.size();
      while (i < end) {
        tiles_.push_back(next_tile(i, end - i, expert));
        i += tiles_.back().size;
      }
      segments_.push_back({expert, first_tile, tiles_.size()});
    }
  }

  // One that begins at row `first`, where `left` rows are to be multiplied.
  Tile next_tile(int64_t first, int64_t left, int64_t expert) const {
    if (few_rows_ && left >= kLeastFewRows && left != 4 && left <= kLargestTile) { // 4 are as fast on vectors
      return {kFewRows, static_cast<int>(std::min<int64_t>(left, kMostFewRows)), first, expert};
    }
    if (many_rows_ > 0 && left >= many_rows_) {
      return {kManyRows, many_rows_, first, expert};
    }
    int kind = kTileSizes - 1;
    while (kTileRows[kind] > left || !has_tile(kind)) {
      --kind;
    }
    return {kind, kTileRows[kind], first, expert};
  }

  bool has_tile(int kind) const {
    if (planes_ == 0) {
      return float_kernels().tile[code_][kind] != nullptr;
    }
    return nested_ ? nested_kernels().tile[planes_ - 1][code_][kind] != nullptr : integer_kernels().tile[planes_ - 1][code_][kind] != nullptr;
  }

  bool load(int64_t i, float* out) const {
    const auto* x = static_cast<const char*>(p_.x.data) + row_at(i) / p_.x_repeats * p_.x.stride * item_;
    return activation_kernels().load[static_cast<int>(p_.dtype)](x, p_.norm, p_.eps, p_.layout.k, padded_, out);
  }

  void prepare() {
    static thread_local Scratch scratch;
    const int64_t values = value_bytes(count_ * padded_), per_block = count_ * blocks_ * 4;
    uint8_t* memory = scratch.take(static_cast<size_t>(values + 8 * per_block + count_));
    prepared_.values = memory;
    prepared_.sums = reinterpret_cast<float*>(memory += values);
    prepared_.scales = reinterpret_cast<float*>(memory += per_block);
    prepared_.half_sums = reinterpret_cast<float*>(memory += per_block);
    prepared_.code_sums = reinterpret_cast<int32_t*>(memory += 2 * per_block);
    prepared_.finite = memory + 4 * per_block;
    // Rows of a tile share cache lines, so a tile is one thread's where there are enough of them.
    const int64_t few = std::max<int64_t>(kPreparedElements / padded_, 1), whole = many_rows_ > 0 ? many_rows_ : kLargestTile;
    const int64_t grain = count_ < 2 * kLargestTile ? few : whole;
    parallel_for(static_cast<size_t>(count_), static_cast<size_t>(grain), [this](size_t begin, size_t end) {
      auto tile = std::upper_bound(tiles_.begin(), tiles_.end(), static_cast<int64_t>(begin), [](int64_t i, const Tile& t) { return i < t.first; }) - 1;
      for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
        tile += i == tile->first + tile->size;
        prepare(*tile, static_cast<int>(i - tile->first));
      }
    });
  }

  // Row `m` of a tile.
  void prepare(const Tile& tile, int m) const {
    static thread_local Scratch scratch;
    float* row = scratch.floats(padded_);
    const int64_t at = tile.first * blocks_;
    const bool finite = load(tile.first + m, row);
    prepared_.finite[tile.first + m] = finite;
    if (!finite) {
      std::fill_n(row, padded_, 0.0f); // computed again, carefully
    }
    uint8_t* values = prepared_.values + value_bytes(at * kBlockColumns);
    if (planes_ == 0) {
      activation_kernels().place(row, blocks_, tile.size, m, reinterpret_cast<float*>(values), prepared_.sums + 2 * at);
    } else if (nested_) {
      activation_kernels().quantize_nests[planes_ - 1](
          row, blocks_ / kNestBlocks, tile.size, m, by_matrix_unit(tile), group_halves_ == 2, p_.layout.zero, reinterpret_cast<int8_t*>(values), prepared_.scales + at,
          prepared_.half_sums + at * group_halves_, prepared_.code_sums + at * group_halves_ * planes_);
    } else {
      activation_kernels().quantize[planes_ - 1](
          row, blocks_, tile.size, m, by_matrix_unit(tile) || tile.kind == kFewRows, reinterpret_cast<int8_t*>(values), prepared_.scales + at,
          prepared_.sums + at, prepared_.half_sums + 2 * at, prepared_.code_sums + 2 * at);
    }
  }

  int64_t result_panels() const {
    return p_.gate ? p_.layout.panels() / 2 : p_.layout.panels();
  }

  // Panels that a thread takes at once.
  int64_t piece_size() const {
    const int64_t work = result_panels() * static_cast<int64_t>(segments_.size());
    const int64_t fair = std::clamp<int64_t>(work / (kPiecesPerThread * thread_count()), 1, kMostPanelsPerPiece);
    return nested_ || many_rows_ > 0 ? (fair + 1) / 2 * 2 : fair; // pairs stay together
  }

  // Prefetches what is read first of a panel.
  void ask_for(const uint8_t* panel) const {
    for (int64_t i = 0; i < distance_; i += 64) {
      __builtin_prefetch(panel + i);
    }
  }

  void run_panels() {
    const int64_t panels = result_panels(), size = piece_size(), pieces = (panels + size - 1) / size;
    const auto all = static_cast<size_t>(pieces) * segments_.size(), threads = static_cast<size_t>(thread_count());
    auto segment_at = [=, this](size_t i) -> const Segment& { return segments_[i / static_cast<size_t>(pieces)]; };
    auto first_of = [=](size_t i) { return static_cast<int64_t>(i % static_cast<size_t>(pieces)) * size; };
    parallel_for(all, 1, [=, this](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const Segment& segment = segment_at(i);
        const int64_t from = first_of(i), to = std::min<int64_t>(from + size, panels);
        if (nested_ && by_matrix_unit(tiles_[segment.first_tile])) { // the largest tiles come first
          for (int64_t panel = from; panel < to; panel += p_.gate ? 1 : 2) {
            run_nested_panels(segment, panel, p_.gate ? panel + panels : std::min(panel + 1, to - 1));
          }
          continue;
        }
        if (tiles_[segment.first_tile].kind == kManyRows) {
          run_many_rows(segment, from, to);
          continue;
        }
        // These come between the others.
        const bool only_few_rows = tiles_[segment.first_tile].kind == kFewRows && tiles_[segment.last_tile - 1].kind == kFewRows;
        // While threads take turns, this one continues with that piece.
        const uint8_t* after = i + threads < all ? panel_start(segment_at(i + threads).expert, first_of(i + threads)) : nullptr;
        if (!only_few_rows) {
          ask_for(panel_start(segment.expert, from));
        }
        for (int64_t panel = from; panel < to && !only_few_rows; ++panel) {
          run_panel(segment, panel, panel + 1 < to ? panel_start(segment.expert, panel + 1) : after);
        }
        run_few_rows(segment, from, to);
      }
    });
  }

  const uint8_t* panel_start(int64_t expert, int64_t index) const {
    return p_.weights + (expert * p_.layout.panels() + index) * p_.layout.panel_bytes();
  }

  // `next`: the panel that is read after this one, or null where none is.
  Panel panel_at(int64_t expert, int64_t index, const uint8_t* next = nullptr) const {
    const Layout& l = p_.layout;
    const uint8_t* start = panel_start(expert, index);
    const int64_t ahead = (kLeastAhead + l.panel_bytes() - 1) / l.panel_bytes() * l.panel_bytes();
    const int blocks = l.is_plain() ? static_cast<int>(blocks_) : std::max(l.group / kBlockColumns, 1);
    const int scale_bytes = static_cast<int>(l.scale_bytes());
    return {start, start + l.header_bytes(), blocks_, blocks, l.scale, scale_bytes, l.has_biases(), static_cast<float>(l.zero), ahead,
            l.panel_bytes(), next == nullptr ? start : next, distance_};
  }

  void run_panel(const Segment& segment, int64_t index, const uint8_t* next) const {
    const int64_t up_index = p_.gate ? index + result_panels() : index;
    const Panel up = panel_at(segment.expert, up_index, next), panel = p_.gate ? panel_at(segment.expert, index, up.headers) : up;
    const bool spread = by_matrix_unit(tiles_[segment.first_tile]);
    const SpreadPanel wide = spread ? spread_panel(panel, 0) : SpreadPanel{};
    const SpreadPanel wide_up = spread && p_.gate ? spread_panel(up, 1) : SpreadPanel{};
    alignas(64) float results[2][kLargestTile * kPanelRows];
    for (size_t t = segment.first_tile; t < segment.last_tile; ++t) {
      if (tiles_[t].kind == kFewRows) {
        continue;
      }
      run_tile(panel, wide, tiles_[t], results[0]);
      if (p_.gate) {
        run_tile(up, wide_up, tiles_[t], results[1]);
      }
      for (int m = 0; m < tiles_[t].size; ++m) {
        finish(tiles_[t], m, index, results[0] + m * kPanelRows, results[1] + m * kPanelRows);
      }
    }
  }

  // Panels in pairs, those of the gate's halves or neighbours.
  void run_many_rows(const Segment& segment, int64_t from, int64_t to) const {
    static thread_local Scratch scratch;
    const ManyRowsKernels& kernels = many_rows_kernels();
    const int64_t width = kernels.panels * kPanelRows, spread = kManyRowsBlocks * kBlockColumns * width, pair = 2 * kLargestTile * kPanelRows;
    const auto count = static_cast<int64_t>(segment.last_tile - segment.first_tile);
    float *weights = scratch.floats(spread + count * pair), *totals = weights + spread;
    for (int64_t index = from; index < to; index += p_.gate ? 1 : 2) {
      const int panel_count = p_.gate || index + 1 < to ? 2 : 1;
      const Panel first = panel_at(segment.expert, index);
      const Panel panels[2] = {first, panel_count == 1 ? first : panel_at(segment.expert, p_.gate ? index + result_panels() : index + 1)};
      std::fill_n(totals, count * pair, 0.0f);
      for (int64_t block = 0; block < blocks_; block += kManyRowsBlocks) {
        const int64_t depth = std::min(kManyRowsBlocks, blocks_ - block);
        for (int i = 0; i < panel_count; i += kernels.panels) {
          kernels.spread[code_ - static_cast<int>(Code::f32)](panels + i, block, depth, weights);
          for (int64_t t = 0; t < count && tiles_[segment.first_tile + static_cast<size_t>(t)].kind == kManyRows; ++t) {
            const Tile& tile = tiles_[segment.first_tile + static_cast<size_t>(t)];
            kernels.tile(weights, depth, floats_of(tile) + block * kBlockColumns * tile.size, totals + t * pair + i * tile.size * kPanelRows);
          }
        }
      }
      for (int64_t t = 0; t < count; ++t) {
        finish_many_rows(tiles_[segment.first_tile + static_cast<size_t>(t)], index, panels, panel_count, totals + t * pair);
      }
    }
  }

  // `totals` are those of a tile of many rows; others are computed here.
  void finish_many_rows(const Tile& tile, int64_t index, const Panel* panels, int count, float* totals) const {
    const bool many = tile.kind == kManyRows, together = many && many_rows_kernels().panels == 2;
    const int64_t step = together ? 2 * kPanelRows : kPanelRows, other = together ? kPanelRows : int64_t{tile.size} * kPanelRows;
    for (int i = 0; i < count; ++i) {
      if (!many) {
        float_kernels().tile[code_][tile.kind](panels[i], {floats_of(tile), prepared_.sums + 2 * tile.first * blocks_}, totals + i * other);
      }
      run_carefully(panels[i], tile, totals + i * other, step);
    }
    for (int m = 0; m < tile.size; ++m) {
      finish(tile, m, index, totals + m * step, totals + m * step + other);
      if (!p_.gate && count == 2) {
        finish(tile, m, index + 1, totals + m * step + other, nullptr);
      }
    }
  }

  // Rows as float32 products read them.
  const float* floats_of(const Tile& tile) const {
    return reinterpret_cast<const float*>(prepared_.values + value_bytes(tile.first * blocks_ * kBlockColumns));
  }

  // The tiles that `run_panel` leaves out, for the panels from `from` to `to`: the unit is set up once for all of them.
  void run_few_rows(const Segment& segment, int64_t from, int64_t to) const {
    static thread_local Scratch scratch;
    for (size_t t = segment.first_tile; t < segment.last_tile; ++t) {
      const Tile& tile = tiles_[t];
      if (tile.kind != kFewRows) {
        continue;
      }
      Panel panels[2 * kMostPanelsPerPiece];
      const int64_t own = to - from, count = p_.gate ? 2 * own : own, size = int64_t{tile.size} * kPanelRows;
      for (int64_t i = 0; i < count; ++i) {
        panels[i] = panel_at(segment.expert, i < own ? from + i : from + i - own + result_panels());
      }
      float* results = scratch.floats(count * size);
      few_rows_kernels().panels[code_][tile.size - kLeastFewRows](panels, count, integer_tile(tile), results);
      for (int64_t i = 0; i < count; ++i) {
        run_carefully(panels[i], tile, results + i * size);
      }
      for (int64_t i = 0; i < own; ++i) {
        for (int m = 0; m < tile.size; ++m) {
          finish(tile, m, from + i, results + i * size + m * kPanelRows, results + (count - own + i) * size + m * kPanelRows);
        }
      }
    }
  }

  // Two panels at once, the second one that of the gate's other half or a neighbour, which may be the first one again.
  void run_nested_panels(const Segment& segment, int64_t first, int64_t second) const {
    static thread_local Scratch scratch;
    const size_t begin = segment.first_tile;
    size_t full = 1;
    while (begin + full < segment.last_tile && by_matrix_unit(tiles_[begin + full])) {
      ++full;
    }
    const Panel panels[2] = {panel_at(segment.expert, first), panel_at(segment.expert, second)};
    const SpreadPanel spread[2] = {spread_panel(panels[0], 0), spread_panel(panels[1], 1)};
    float* sums = scratch.floats(2 * static_cast<int64_t>(full) * kLargestTile * kPanelRows);
    nested_matrix_kernels().tiles[planes_ - 1][code_](spread, nested_tile(tiles_[begin]), static_cast<int64_t>(full), sums);
    alignas(64) float rest[2][kLargestTile * kPanelRows];
    for (size_t t = 0; t < segment.last_tile - begin; ++t) {
      const Tile& tile = tiles_[begin + t];
      float* results[2];
      for (size_t i = 0; i < 2; ++i) {
        results[i] = t < full ? sums + (i * full + t) * kLargestTile * kPanelRows : rest[i];
        if (t >= full) {
          nested_kernels().tile[planes_ - 1][code_][tile.kind](panels[i], nested_tile(tile), results[i]);
        }
        run_carefully(panels[i], tile, results[i]);
      }
      for (int m = 0; m < tile.size; ++m) {
        finish(tile, m, first, results[0] + m * kPanelRows, results[1] + m * kPanelRows);
        if (!p_.gate && second != first) {
          finish(tile, m, second, results[1] + m * kPanelRows, nullptr);
        }
      }
    }
  }

  NestedTile nested_tile(const Tile& tile) const {
    const int64_t at = tile.first * blocks_;
    return {reinterpret_cast<const int8_t*>(prepared_.values + value_bytes(at * kBlockColumns)), prepared_.scales + at,
            prepared_.half_sums + at * group_halves_, prepared_.code_sums + at * group_halves_ * planes_};
  }

  IntegerTile integer_tile(const Tile& tile) const {
    const int64_t at = tile.first * blocks_;
    return {reinterpret_cast<const int32_t*>(prepared_.values + value_bytes(at * kBlockColumns)), prepared_.scales + at, prepared_.sums + at,
            prepared_.half_sums + 2 * at, prepared_.code_sums + 2 * at};
  }

  bool by_matrix_unit(const Tile& tile) const {
    return on_matrix_unit_ && tile.size == kLargestTile;
  }

  // `index`: which one of the panels that are in use at once.
  SpreadPanel spread_panel(const Panel& panel, int index) const {
    static thread_local Scratch scratch[2];
    const Code code = p_.layout.code;
    const int64_t code_bytes = blocks_ * kSpreadBlockBytes * (nested_ ? nested_bytes(code) : 1);
    const int64_t scales = nested_ ? blocks_ / kNestBlocks * nested_scales(code) : blocks_ * spread_scales(code);
    uint8_t* codes = scratch[index].take(static_cast<size_t>(code_bytes + scales * 4));
    const SpreadPanel spread{codes, reinterpret_cast<float*>(codes + code_bytes), blocks_};
    (nested_ ? nested_matrix_kernels().spread : matrix_kernels().spread)[code_](panel, spread);
    return spread;
  }

  void run_tile(const Panel& panel, const SpreadPanel& spread, const Tile& tile, float* out) const {
    const int64_t at = tile.first * blocks_;
    const uint8_t* values = prepared_.values + value_bytes(at * kBlockColumns);
    if (planes_ == 0) {
      float_kernels().tile[code_][tile.kind](panel, {reinterpret_cast<const float*>(values), prepared_.sums + 2 * at}, out);
    } else if (nested_) {
      nested_kernels().tile[planes_ - 1][code_][tile.kind](panel, nested_tile(tile), out);
    } else {
      const IntegerTile x = integer_tile(tile);
      if (by_matrix_unit(tile)) {
        matrix_kernels().tile[planes_ - 1][code_](spread, x, out);
      } else {
        integer_kernels().tile[planes_ - 1][code_][tile.kind](panel, x, out);
      }
    }
    run_carefully(panel, tile, out);
  }

  // Rows that are not finite, again.
  void run_carefully(const Panel& panel, const Tile& tile, float* out, int64_t step = kPanelRows) const {
    static thread_local Scratch scratch;
    for (int m = 0; m < tile.size; ++m) {
      if (!prepared_.finite[tile.first + m]) {
        float* row = scratch.floats(padded_);
        load(tile.first + m, row);
        float_kernels().careful[code_](panel, {row, nullptr}, out + m * step);
      }
    }
  }

  void finish(const Tile& tile, int m, int64_t panel, const float* x, const float* up) const {
    const int64_t width = p_.gate ? p_.layout.n / 2 : p_.layout.n, column = panel * kPanelRows;
    const int columns = static_cast<int>(std::min<int64_t>(kPanelRows, width - column));
    const int64_t row = row_at(tile.first + m);
    const int dtype = static_cast<int>(p_.dtype);
    auto at = [this](const void* base, int64_t element) -> const void* {
      return base == nullptr ? nullptr : static_cast<const char*>(base) + element * item_;
    };
    const void* bias = at(p_.bias, tile.expert * p_.layout.n + column);
    void* y = static_cast<char*>(p_.y) + (row * width + column) * item_;
    if (p_.gate) {
      const void* up_bias = at(p_.bias, tile.expert * p_.layout.n + width + column);
      finish_kernels().gated[dtype][static_cast<int>(*p_.gate)](x, up, columns, bias, up_bias, y);
    } else {
      finish_kernels().plain[dtype](x, columns, bias, at(p_.residual.data, row * p_.residual.stride + column), y);
    }
  }

  const Product& p_;
  const int planes_; // of integer activations, 0 for float32
  const int64_t blocks_, padded_;
  const int64_t item_; // bytes of an element
  const int code_;
  const bool nested_; // scales, and products of integers
  const int group_halves_; // groups of a block; of nested scales
  const bool few_rows_; // tiles of that kind
  const int many_rows_; // of tiles of that kind, 0 for none
  const bool on_matrix_unit_;
  std::vector<int64_t> order_;
  int64_t rows_ = 0; // that are computed
  int64_t first_ = 0, count_ = 0; // of the chunk
  int64_t distance_ = 0; // bytes before a place is read that it is prefetched
  std::vector<Tile> tiles_;
  std::vector<Segment> segments_;
  Prepared prepared_{};
};

} // namespace

void multiply(const Product& product) {
  if (product.rows > 0 && product.layout.n > 0) {
    Run(product).all();
  }
}

} // namespace mlxinfer::cpu
