#include "attention/load.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

void unpack_values(PageTile& tile, int64_t tokens, int64_t dim, const Room& room) {
  page_kernels().unpack[tile.values.form](tile.values, tokens, dim, room.width, room.values);
  tile.values = {room.values, room.width * kFloatBytes, 0};
}

} // namespace

PageTile open_tile(const AttentionWork& work, const PlanSegment& segment, int64_t head, int64_t tokens, const Room& room) {
  const PageStore &keys = work.keys, &values = work.values;
  PageTile tile{};
  page_kernels().turn[keys.raw.form](keys.open_page(segment.slot, head), tokens, keys.dim, room.keys);
  tile.keys = {room.keys, kPageTokens * kFloatBytes, 0};
  tile.values = {values.open_page(segment.slot, head), values.raw.row_bytes(), values.raw.form};
  if (values.dim != room.width) {
    unpack_values(tile, tokens, values.dim, room);
  }
  return tile;
}

PageTile full_tile(const AttentionWork& work, const Page& keys, const Page& values, int64_t rows, const Room& room) {
  const auto& kernels = page_kernels();
  const int64_t dim = work.keys.dim;
  const bool many = rows > kBlockRows;
  PageTile tile{};
  tile.keys = {keys.data, keys.form->row_bytes(), keys.form->form};
  tile.key_scales = keys.scales;
  if (many && tile.keys.form != 0) {
    kernels.unpack[tile.keys.form](tile.keys, dim, kPageTokens, kPageTokens, room.keys);
    tile.keys = {room.keys, kPageTokens * kFloatBytes, 0};
  }
  tile.values = {values.data, values.form->row_bytes(), values.form->form};
  tile.value_group = values.form->group;
  const bool coded = values.scales != nullptr;
  const bool whole = work.values.dim == room.width && (!coded || tile.value_group % attention_kernels().width == 0);
  if (!whole || (many && tile.values.form != 0)) {
    unpack_values(tile, kPageTokens, work.values.dim, room);
  }
  if (coded && whole) {
    const int64_t groups = values.form->groups();
    kernels.scales(values.scales, kPageTokens, groups, room.value_scales + groups * 2 * kPageTokens, room.value_scales);
    tile.value_scales = room.value_scales;
  } else if (coded) {
    kernels.dequantize(values.scales, *values.form, room.width, room.values);
  }
  return tile;
}

} // namespace mlxinfer::cpu
