#include "attention/operands.h"

namespace mlxinfer::cpu {

int64_t query_heads(const std::vector<int64_t>& widths, const HeadSizes& sizes) {
  int64_t queries = -sizes.kv * (sizes.key_dim + sizes.value_dim);
  for (int64_t width : widths) {
    queries += width;
  }
  const int64_t heads = queries / sizes.key_dim;
  if (queries <= 0 || queries % sizes.key_dim != 0 || heads % sizes.kv != 0) {
    return 0;
  }
  auto piece = widths.begin();
  int64_t left = *piece;
  for (int64_t part : {queries, sizes.kv * sizes.key_dim, sizes.kv * sizes.value_dim}) {
    if (left == 0) {
      left = *++piece;
    }
    if (left < part) {
      return 0;
    }
    left -= part;
  }
  return heads;
}

void split_heads(const std::vector<RowsOfHeads>& pieces, int64_t heads, AttentionWork& work) {
  auto piece = pieces.begin();
  int64_t offset = 0;
  auto next = [&](int64_t count, int64_t dim) {
    if (offset == piece->rows.size) {
      ++piece;
      offset = 0;
    }
    const int64_t item = item_bytes(piece->dtype);
    Heads part{static_cast<const char*>(piece->rows.data) + offset * item, piece->rows.stride * item, dim * item, dim,
               static_cast<int>(piece->dtype)};
    offset += count * dim;
    return part;
  };
  work.queries = next(heads, work.keys.dim);
  work.new_keys = next(work.keys.kv_heads, work.keys.dim);
  work.new_values = next(work.keys.kv_heads, work.values.dim);
}

void check_pages(const std::string& operation, const Arrays& sealed, const Arrays& open, const AttentionPlan& plan) {
  bool fits = sealed.size() == 2 && open.size() == 2;
  for (size_t i = 0; fits && i < 2; ++i) {
    const auto &s = sealed[i], &o = open[i];
    fits = s.ndim() == 4 && o.ndim() == 4 && is_floating(o) && o.dtype() == s.dtype() && s.shape(0) == open[0].shape(1) &&
        o.shape(1) == open[0].shape(1) && s.shape(2) == kPageTokens && o.shape(2) == kPageTokens && s.shape(3) == o.shape(3) && o.shape(3) > 0 &&
        s.shape(1) >= plan.sealed_pages && o.shape(0) >= plan.slots && o.shape(1) > 0;
  }
  if (!fits) {
    refuse(operation, "sealed pages " + shapes_text(sealed) + " and open pages " + shapes_text(open) + " must be keys and values [heads, " +
           std::to_string(plan.sealed_pages) + " or more, 64, dim] and [" + std::to_string(plan.slots) + " or more, heads, 64, dim].");
  }
}

PageStore page_store(const mx::array& sealed, const mx::array& open, const AttentionPlan& plan, mx::cpu::CommandEncoder& encoder) {
  PageStore store{};
  store.kv_heads = open.shape(1);
  store.dim = open.shape(3);
  store.sealed_pages = sealed.shape(1);
  store.full_pages = plan.full_pages;
  store.item_size = static_cast<int64_t>(open.itemsize());
  store.dtype = static_cast<int>(float_of(open));
  store.sealed = static_cast<const char*>(elements_of(sealed, encoder));
  store.open = const_cast<char*>(open.data<char>());
  return store;
}

std::string shapes_text(const Arrays& arrays) {
  std::string text;
  for (const auto& a : arrays) {
    text += (text.empty() ? "" : " ") + dtype_text(a) + shape_text(a.shape());
  }
  return text;
}

} // namespace mlxinfer::cpu
