// Attention of a tile of query rows to a page, by online softmax (arXiv:1805.02867).

#include "attention/tile.h"
#include "simd/floats.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

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

// Queries times the scales of the keys, and what the biases add to every score.
void fold(const QueryTile& tile, const void* key_scales, int64_t row, int rows, float* add) {
  auto scales = static_cast<const Half*>(key_scales), biases = scales + tile.key_dim;
  for (int r = 0; r < rows; ++r) {
    const float* query = tile.queries + (row + r) * tile.key_dim;
    float* folded = tile.room + r * tile.key_dim;
    F32 sum = {};
    for_lanes(tile.key_dim, [&](auto load, auto store, int64_t d) {
      F32 q = load(query + d);
      store(folded + d, q * load(scales + d));
      sum = fma(q, load(biases + d), sum);
    });
    add[r] = sum_across(sum);
  }
}

// Weights times the scales of a group of values, and what the biases add to every channel.
void weigh(const float* weights, const float* value_scales, int rows, float* weighed, float* add) {
  for (int r = 0; r < rows; ++r) {
    F32 sum = {};
    for (int64_t t = 0; t < kPageTokens; t += kWidth) {
      F32 w = load(weights + r * kPageTokens + t);
      store(weighed + r * kPageTokens + t, w * load(value_scales + t));
      sum = fma(w, load(value_scales + kPageTokens + t), sum);
    }
    add[r] = sum_across(sum);
  }
}

void add_values(const QueryTile& tile, const PageTile& page, PageProduct product) {
  const auto multiply = page_product_kernels_table.multiply[page.values.form];
  if (page.value_scales == nullptr) {
    return multiply(product);
  }
  alignas(64) float weighed[kBlockRows * kPageTokens];
  float add[kBlockRows];
  const float* weights = product.a;
  auto codes = static_cast<const char*>(product.b);
  float* out = product.c;
  product.a = weighed;
  product.add = add;
  product.width = page.value_group;
  product.soon_bytes /= tile.value_width / page.value_group;
  for (int64_t from = 0; from < tile.value_width; from += page.value_group) {
    weigh(weights, page.value_scales + from / page.value_group * 2 * kPageTokens, product.rows, weighed, add);
    product.b = codes + form_bytes(page.values.form, from);
    product.c = out + from;
    multiply(product);
    product.soon = static_cast<const char*>(product.soon) + product.soon_bytes;
  }
}

void add_rows(const QueryTile& tile, const PageTile& page, const Partial& done, int64_t row, int rows, bool prefetch) {
  alignas(64) float scores[kBlockRows * kPageTokens];
  float shrink[kBlockRows], add[kBlockRows] = {};
  const float* queries = tile.queries + row * tile.key_dim;
  if (page.key_scales != nullptr) {
    fold(tile, page.key_scales, row, rows, add);
    queries = tile.room;
  }
  const int64_t width = (page.tokens + kWidth - 1) / kWidth * kWidth;
  const int64_t value_bytes = prefetch ? page.values.stride * page.tokens : 0;
  page_product_kernels_table.multiply[page.keys.form](
      {rows, queries, tile.key_dim, tile.key_dim, page.keys.data, page.keys.stride, width, scores, kPageTokens, nullptr, add, page.values.data,
       value_bytes, prefetch && page.cold});
  int64_t seen = 0;
  for (int r = 0; r < rows; ++r) {
    const int64_t position = tile.first + (row + r) / tile.heads_per_kv - page.first;
    const int64_t to = position + 1 < page.tokens ? position + 1 : page.tokens;
    const int64_t from = position + 1 - tile.window;
    seen = to > seen ? to : seen;
    shrink[r] = soften(scores + r * kPageTokens, width, from, to, tile.softcap, done.max + row + r, done.sum + row + r);
    add[r] = 0;
  }
  add_values(tile, page,
             {rows, scores, kPageTokens, seen, page.values.data, page.values.stride, tile.value_width, done.out + row * tile.value_width,
              tile.value_width, shrink, add, page.next, prefetch ? page.next_bytes : 0, false});
}

void add_page(const QueryTile& tile, const PageTile& page, const Partial& done, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row += kBlockRows) {
    add_rows(tile, page, done, row, static_cast<int>(end - row < kBlockRows ? end - row : kBlockRows), row == begin);
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
