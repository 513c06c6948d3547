// Attention of a tile of query rows to a page, by online softmax (arXiv:1805.02867).

#include "attention/tile.h"
#include "simd/floats.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// A block of the products lies in kRows * kColumns vector registers, beside kColumns and one more for the factors.
constexpr int kRows = 6;
#if defined(__AVX512VNNI__) || defined(__aarch64__)
constexpr int kColumns = 4;
#else
constexpr int kColumns = 2;
#endif

struct Left {
  const float* data;
  int64_t stride;
};

// c = scale * c + a b, or a b without scales: a [R][depth], b [depth][Columns vectors], c [R][Columns vectors].
template <int R, int Columns, bool Accumulate>
MLXINFER_INLINE void multiply_block(Left a, int64_t depth, const float* b, int64_t b_stride, float* c, int64_t c_stride, const float* scale) {
  F32 sums[R][Columns];
  MLXINFER_UNROLL
  for (int r = 0; r < R; ++r) {
    MLXINFER_UNROLL
    for (int j = 0; j < Columns; ++j) {
      sums[r][j] = Accumulate ? load(c + r * c_stride + j * kWidth) * scale[r] : F32{};
    }
  }
  for (int64_t k = 0; k < depth; ++k, b += b_stride) {
    F32 row[Columns];
    MLXINFER_UNROLL
    for (int j = 0; j < Columns; ++j) {
      row[j] = load(b + j * kWidth);
    }
    MLXINFER_UNROLL
    for (int r = 0; r < R; ++r) {
      F32 factor = broadcast(a.data[r * a.stride + k]);
      MLXINFER_UNROLL
      for (int j = 0; j < Columns; ++j) {
        sums[r][j] = fma(factor, row[j], sums[r][j]);
      }
    }
  }
  MLXINFER_UNROLL
  for (int r = 0; r < R; ++r) {
    MLXINFER_UNROLL
    for (int j = 0; j < Columns; ++j) {
      store(c + r * c_stride + j * kWidth, sums[r][j]);
    }
  }
}

template <int R, bool Accumulate>
MLXINFER_INLINE void multiply(
    Left a, int64_t depth, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t width, const float* scale) {
  int64_t j = 0;
  for (; j + kColumns * kWidth <= width; j += kColumns * kWidth) {
    multiply_block<R, kColumns, Accumulate>(a, depth, b + j, b_stride, c + j, c_stride, scale);
  }
  for (; j < width; j += kWidth) {
    multiply_block<R, 1, Accumulate>(a, depth, b + j, b_stride, c + j, c_stride, scale);
  }
}

MLXINFER_INLINE I32 lane_numbers() {
  I32 lanes;
  for (int i = 0; i < kWidth; ++i) {
    lanes[i] = i;
  }
  return lanes;
}

MLXINFER_INLINE F32 capped(F32 x, float cap) {
  F32 e = exp(x * (2.0f / cap));
  return cap - (2.0f * cap) / (e + 1.0f);
}

// Scores to exp(score - max) over the vectors of a row; those outside [from, to) become zero. Returns what earlier sums are to be
// multiplied by.
MLXINFER_INLINE float soften(float* scores, int64_t width, int64_t from, int64_t to, float softcap, float* max_so_far, float* sum) {
  F32 highest = broadcast(-__builtin_inff());
  I32 unordered = {};
  const I32 lanes = lane_numbers();
  const bool all = from <= 0 && to >= width;
  for (int64_t t = 0; t < width; t += kWidth) {
    F32 s = load(scores + t);
    if (softcap != 0) {
      s = capped(s, softcap);
    }
    if (!all) {
      I32 token = lanes + static_cast<int32_t>(t);
      s = ((token >= static_cast<int32_t>(from)) & (token < static_cast<int32_t>(to))) ? s : broadcast(-__builtin_inff());
    }
    store(scores + t, s);
    highest = max(s, highest);
    unordered |= s != s;
  }
  const float before = *max_so_far, row_max = max_across(highest);
  const float now = row_max > before ? row_max : before;
  if (now == -__builtin_inff()) { // nothing to see, or nothing but NaN
    memset(scores, 0, sizeof(float) * static_cast<size_t>(width));
    for (int i = 0; i < kWidth; ++i) {
      if (unordered[i]) {
        *max_so_far = 0;
        *sum = __builtin_nanf("");
      }
    }
    return 1.0f;
  }
  F32 total = {};
  for (int64_t t = 0; t < width; t += kWidth) {
    F32 e = exp(load(scores + t) - now);
    store(scores + t, e);
    total += e;
  }
  const float shrink = exp(broadcast(before - now))[0];
  *max_so_far = now;
  *sum = *sum * shrink + sum_across(total);
  return shrink;
}

template <int R>
void add_rows(const QueryTile& tile, const PageTile& page, const Partial& done, int64_t row) {
  alignas(64) float scores[R * kPageTokens];
  float shrink[R];
  int64_t width = (page.tokens + kWidth - 1) / kWidth * kWidth;
  multiply<R, false>({tile.queries + row * tile.key_dim, tile.key_dim}, tile.key_dim, page.keys, kPageTokens, scores, kPageTokens, width, nullptr);
  int64_t seen = 0;
  for (int r = 0; r < R; ++r) {
    const int64_t position = tile.first + (row + r) / tile.heads_per_kv - page.first;
    const int64_t to = position + 1 < page.tokens ? position + 1 : page.tokens;
    const int64_t from = position + 1 - tile.window;
    seen = to > seen ? to : seen;
    shrink[r] = soften(scores + r * kPageTokens, width, from, to, tile.softcap, done.max + row + r, done.sum + row + r);
  }
  multiply<R, true>(
      {scores, kPageTokens}, seen, page.values, page.value_stride, done.out + row * tile.value_width, tile.value_width, tile.value_width, shrink);
}

void add_page(const QueryTile& tile, const PageTile& page, const Partial& done) {
  // Rows before `row` see nothing of the page, as all of it comes after them.
  int64_t row = page.first > tile.first ? (page.first - tile.first) * tile.heads_per_kv : 0;
  for (; row + kRows <= tile.rows; row += kRows) {
    add_rows<kRows>(tile, page, done, row);
  }
  switch (tile.rows - row) {
    case 5:
      return add_rows<5>(tile, page, done, row);
    case 4:
      return add_rows<4>(tile, page, done, row);
    case 3:
      return add_rows<3>(tile, page, done, row);
    case 2:
      return add_rows<2>(tile, page, done, row);
    case 1:
      return add_rows<1>(tile, page, done, row);
  }
}

void merge(const Partial& into, const Partial& other, int64_t rows, int64_t value_width) {
  for (int64_t r = 0; r < rows; ++r) {
    const float a = into.max[r], b = other.max[r], now = a > b ? a : b;
    if (now == -__builtin_inff()) {
      continue;
    }
    const float keep = exp(broadcast(a - now))[0], add = exp(broadcast(b - now))[0];
    into.max[r] = now;
    into.sum[r] = into.sum[r] * keep + other.sum[r] * add;
    float* to = into.out + r * value_width;
    const float* from = other.out + r * value_width;
    for (int64_t i = 0; i < value_width; i += kWidth) {
      store(to + i, fma(load(from + i), broadcast(add), load(to + i) * keep));
    }
  }
}

template <typename T>
void finish(const float* partial, float max, float sum, const float* sink, void* out, int64_t dim) {
  float keep = 1;
  if (sink != nullptr) {
    const float now = *sink > max ? *sink : max;
    keep = exp(broadcast(max - now))[0];
    sum = sum * keep + exp(broadcast(*sink - now))[0];
  }
  const float factor = keep / sum;
  for_lanes(dim, [=](auto load, auto store, int64_t i) { store(static_cast<T*>(out) + i, load(partial + i) * factor); });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(AttentionKernels, attention_kernels) = {
    kWidth, add_page, merge, {finish<float>, finish<Bfloat>, finish<Half>}};
} // namespace mlxinfer::cpu
