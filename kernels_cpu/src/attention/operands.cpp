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

PageForm PageArrays::form(bool values, bool raw) const {
  const mx::array& open_pages = open[values ? 1 : 0];
  const int64_t dim = open_pages.shape(3), size = values ? dim : kPageTokens;
  const int width = bits[values ? 1 : 0];
  const bool codes = !raw && width != 16;
  const int form = codes ? form_of_bits(width) : static_cast<int>(float_of(open_pages));
  return {form, values ? kPageTokens : dim, size, values && codes ? value_group(dim) : size, values};
}

namespace {

// Arrays of `count` pages of each head, of keys and of values.
std::vector<ArrayKind> kinds_of(const PageArrays& pages, bool raw, int64_t count) {
  const int heads = pages.open[0].shape(1), n = static_cast<int>(count);
  std::vector<ArrayKind> kinds;
  for (bool values : {false, true}) {
    const PageForm form = pages.form(values, raw);
    const int rows = static_cast<int>(form.rows), groups = static_cast<int>(form.groups());
    if (!form.has_codes()) {
      kinds.push_back({{heads, n, rows, static_cast<int>(form.size)}, pages.open[values ? 1 : 0].dtype()});
      continue;
    }
    kinds.push_back({{heads, n, rows, static_cast<int>(form.row_bytes() / 4)}, mx::uint32});
    kinds.push_back({values ? mx::Shape{heads, n, 2, rows, groups} : mx::Shape{heads, n, 2, rows}, mx::float16});
  }
  return kinds;
}

// Whether arrays are of these kinds, apart from the number of pages, which is `least` or more.
bool are_of(const Arrays& arrays, std::vector<ArrayKind> kinds, int64_t least) {
  bool fits = arrays.size() == kinds.size();
  for (size_t i = 0; fits && i < kinds.size(); ++i) {
    const auto& a = arrays[i];
    fits = a.ndim() == kinds[i].shape.size() && a.dtype() == kinds[i].dtype && a.shape(1) >= least;
    kinds[i].shape[1] = fits ? a.shape(1) : 0;
    fits = fits && a.shape() == kinds[i].shape && (i == 0 || a.shape(1) == arrays[0].shape(1));
  }
  return fits;
}

void check_bits(const std::string& operation, const PageArrays& pages) {
  for (int bits : pages.bits) {
    if (bits != 16 && form_of_bits(bits) < 0) {
      refuse(operation, "there are no pages of " + std::to_string(bits) + " bits, only of 16, 8, 6, 5, 4, 3 and 2.");
    }
  }
  const int64_t dim = pages.sizes().value_dim;
  if (pages.bits[1] != 16 && value_group(dim) == 0) {
    refuse(operation, "values of " + std::to_string(dim) + " channels, not a multiple of 8, have pages of 16 bits only.");
  }
}

PagePool pool_of(const PageForm& form, const mx::array*& next, mx::cpu::CommandEncoder& encoder) {
  PagePool pool;
  pool.count = next->shape(1);
  pool.data = static_cast<char*>(const_cast<void*>(elements_of(*next++, encoder)));
  if (form.has_codes()) {
    pool.scales = static_cast<char*>(const_cast<void*>(elements_of(*next++, encoder)));
  }
  return pool;
}

} // namespace

void check_pages(const std::string& operation, const PageArrays& pages, const AttentionPlan& plan) {
  const auto& open = pages.open;
  bool fits = open.size() == 2;
  for (size_t i = 0; fits && i < 2; ++i) {
    const auto& o = open[i];
    fits = o.ndim() == 4 && is_floating(o) && o.shape(1) == open[0].shape(1) && o.shape(2) == kPageTokens && o.shape(3) > 0 &&
        o.shape(0) >= plan.slots && o.shape(1) > 0;
  }
  if (!fits) {
    refuse(operation, "open pages " + shapes_text(open) + " must be keys and values [" + std::to_string(plan.slots) + " or more, heads, 64, dim].");
  }
  check_bits(operation, pages);
  if (!are_of(pages.sealed, kinds_of(pages, false, 0), plan.sealed_pages)) {
    refuse(operation, "sealed pages " + shapes_text(pages.sealed) + " must be " + std::to_string(plan.sealed_pages) + " or more of " +
           std::to_string(pages.bits[0]) + " and " + std::to_string(pages.bits[1]) + " bits for open pages " + shapes_text(open) + ".");
  }
  if (pages.first.empty() ? plan.first_pages > 0 : !are_of(pages.first, kinds_of(pages, true, 0), plan.first_pages)) {
    refuse(operation, "first pages " + shapes_text(pages.first) + " must be " + std::to_string(plan.first_pages) +
           " or more of 16 bits for open pages " + shapes_text(open) + ".");
  }
}

std::vector<ArrayKind> filled_kinds(const PageArrays& pages, const AttentionPlan& plan) {
  const bool first = !pages.first.empty();
  auto kinds = kinds_of(pages, false, plan.full_pages - (first ? plan.first_full_pages : 0));
  if (first) {
    const auto raw = kinds_of(pages, true, plan.first_full_pages);
    kinds.insert(kinds.end(), raw.begin(), raw.end());
  }
  return kinds;
}

void set_stores(const PageArrays& pages, const mx::array* filled, mx::cpu::CommandEncoder& encoder, AttentionWork& work) {
  const mx::array *sealed = pages.sealed.data(), *first = pages.first.data();
  for (bool values : {false, true}) {
    PageStore& store = values ? work.values : work.keys;
    const mx::array& open = pages.open[values ? 1 : 0];
    store = {};
    store.keys = !values;
    store.kv_heads = open.shape(1);
    store.dim = open.shape(3);
    store.form = pages.form(values);
    store.raw = pages.form(values, true);
    store.open = const_cast<char*>(open.data<char>());
    store.keeps_first = !pages.first.empty();
    store.sealed = pool_of(store.form, sealed, encoder);
    if (store.keeps_first) {
      store.first = pool_of(store.raw, first, encoder);
    }
    if (filled != nullptr) {
      store.filled = pool_of(store.form, filled, encoder);
    }
  }
  if (filled != nullptr && work.keys.keeps_first) {
    work.keys.filled_first = pool_of(work.keys.raw, filled, encoder);
    work.values.filled_first = pool_of(work.values.raw, filled, encoder);
  }
}

std::string shapes_text(const Arrays& arrays) {
  std::string text;
  for (const auto& a : arrays) {
    text += (text.empty() ? "" : " ") + dtype_text(a) + shape_text(a.shape());
  }
  return text;
}

} // namespace mlxinfer::cpu
