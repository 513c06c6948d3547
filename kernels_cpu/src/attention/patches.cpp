// Attention of all rows of an image to all of them, without a cache.

#include "attention/patches.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "memory/scratch.h"
#include "op/bindings.h"
#include "op/op.h"
#include "threads/pool.h"

namespace mlxinfer::cpu {
namespace {

constexpr int64_t kRoomBytes = 16 << 20; // for keys and values in float32, if not for one head
constexpr int64_t kTiles = 8; // of queries that see a step of keys one after the other, from a core's cache

// `[batch, rows, heads, dim]`, the last axis contiguous.
struct Heads {
  const char* data;
  int64_t batch, row, head; // distances in bytes

  const char* at(int64_t b, int64_t i, int64_t h) const {
    return data + b * batch + i * row + h * head;
  }
};

Heads heads_of(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  const auto item = static_cast<int64_t>(a.itemsize());
  if (a.shape(3) == 1 || a.strides(3) == 1) {
    return {a.data<char>(), a.strides(0) * item, a.strides(1) * item, a.strides(2) * item};
  }
  const int64_t head = a.shape(3) * item, row = a.shape(2) * head;
  return {static_cast<const char*>(elements_of(a, encoder)), a.shape(1) * row, row, head};
}

struct PatchWork {
  Heads queries, keys, values;
  const float *cos, *sin; // [rows or batch * rows][dim], or null
  bool turns_differ; // between elements of the batch
  int parts;
  int64_t batch, rows, heads, kv, dim;
  float scale;
  Float dtype;
  char* out; // [batch * rows][heads * dim]

  void run() const;

 private:
  struct Room {
    float *keys, *values; // of one head after the other
    int64_t key_size, value_size; // floats of a head
    int64_t width; // of a row of values
  };

  const float* turned(const float* table, int64_t b, int64_t i) const {
    return table == nullptr ? nullptr : table + ((turns_differ ? b * rows : 0) + i) * dim;
  }
  void place(const Room& room, int64_t pair, int64_t index, int64_t begin, int64_t end) const;
  void attend(const Room& room, int64_t pair, int64_t index, int64_t head, int64_t begin, int64_t end) const;
};

// Pairs are elements of the batch and their KV heads.
void PatchWork::run() const {
  static thread_local Scratch scratch;
  const PatchKernels& kernels = patch_kernels();
  Room room{};
  room.width = (dim + kernels.lanes - 1) / kernels.lanes * kernels.lanes;
  room.key_size = (rows + kernels.block_keys - 1) / kernels.block_keys * kernels.block_keys * dim;
  room.key_size = (room.key_size + 15) / 16 * 16;
  room.value_size = (rows * room.width + 15) / 16 * 16;
  const int64_t pairs = batch * kv, group = heads / kv, size = room.key_size + room.value_size;
  const int64_t together = std::clamp<int64_t>(kRoomBytes / (size * 4), 1, pairs);
  room.keys = scratch.floats(together * size);
  room.values = room.keys + together * room.key_size;
  const int64_t placed = kernels.block_keys * kTiles, asked = kernels.rows * kTiles;
  const int64_t key_pieces = (rows + placed - 1) / placed, query_pieces = (rows + asked - 1) / asked;
  for (int64_t first = 0; first < pairs; first += together) {
    const int64_t count = std::min(together, pairs - first);
    parallel_for(static_cast<size_t>(count * key_pieces), 1, [&](size_t from, size_t to) {
      for (auto i = static_cast<int64_t>(from); i < static_cast<int64_t>(to); ++i) {
        const int64_t begin = i % key_pieces * placed;
        place(room, first + i / key_pieces, i / key_pieces, begin, std::min(begin + placed, rows));
      }
    });
    parallel_for(static_cast<size_t>(count * group * query_pieces), 1, [&](size_t from, size_t to) {
      for (auto i = static_cast<int64_t>(from); i < static_cast<int64_t>(to); ++i) {
        const int64_t begin = i % query_pieces * asked, own = i / query_pieces;
        attend(room, first + own / group, own / group, own % group, begin, std::min(begin + asked, rows));
      }
    });
  }
}

void PatchWork::place(const Room& room, int64_t pair, int64_t index, int64_t begin, int64_t end) const {
  static thread_local Scratch scratch;
  const PatchKernels& kernels = patch_kernels();
  const auto load = kernels.load[static_cast<int>(dtype)];
  const int64_t b = pair / kv, head = pair % kv, block = kernels.block_keys;
  float *keys = room.keys + index * room.key_size, *values = room.values + index * room.value_size, *row = scratch.floats(dim);
  for (int64_t i = begin; i < end; ++i) {
    load(this->keys.at(b, i, head), dim, parts, turned(cos, b, i), turned(sin, b, i), 1.0f, row);
    float* to = keys + i / block * block * dim + i % block;
    for (int64_t d = 0; d < dim; ++d) {
      to[d * block] = row[d];
    }
    float* value = values + i * room.width;
    load(this->values.at(b, i, head), dim, 1, nullptr, nullptr, 1.0f, value);
    std::fill(value + dim, value + room.width, 0.0f);
  }
  for (int64_t i = end; i % block != 0; ++i) { // behind the last row
    for (int64_t d = 0; d < dim; ++d) {
      keys[i / block * block * dim + i % block + d * block] = 0.0f;
    }
  }
}

void PatchWork::attend(const Room& room, int64_t pair, int64_t index, int64_t head, int64_t begin, int64_t end) const {
  static thread_local Scratch scratch;
  const PatchKernels& kernels = patch_kernels();
  const int64_t b = pair / kv, own = pair % kv * (heads / kv) + head, height = kernels.rows, tiles = (end - begin + height - 1) / height;
  float* queries = scratch.floats(tiles * height * (dim + room.width + 2) + dim);
  float* out = queries + tiles * height * dim;
  float *sums = out + tiles * height * room.width, *most = sums + tiles * height, *row = most + tiles * height;
  std::fill(queries, most, 0.0f);
  std::fill(most, row, -std::numeric_limits<float>::infinity());
  for (int64_t i = begin; i < end; ++i) {
    const float factor = scale * 1.44269504f;
    kernels.load[static_cast<int>(dtype)](this->queries.at(b, i, own), dim, parts, turned(cos, b, i), turned(sin, b, i), factor, row);
    float* to = queries + (i - begin) / height * height * dim + (i - begin) % height;
    for (int64_t d = 0; d < dim; ++d) {
      to[d * height] = row[d];
    }
  }
  for (int64_t first = 0; first < rows; first += kPatchStep) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t at = tile * height;
      kernels.add({queries + at * dim, room.keys + index * room.key_size, room.values + index * room.value_size, dim, room.width, rows,
                   out + at * room.width, most + at, sums + at},
                  first);
    }
  }
  const int64_t item = item_bytes(dtype);
  for (int64_t i = begin; i < end; ++i) {
    char* to = this->out + ((b * rows + i) * heads + own) * dim * item;
    kernels.finish[static_cast<int>(dtype)](out + (i - begin) * room.width, sums[i - begin], dim, to);
  }
}

// Inputs: queries, keys, values, then cosines and sines or nothing.
class PatchAttention : public Operation {
 public:
  PatchAttention(mx::Stream stream, float scale, int parts) : Operation(stream), scale_(scale), parts_(parts) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    if (outputs[0].size() == 0) {
      return;
    }
    const mx::array& q = inputs[0];
    PatchWork work{};
    work.queries = heads_of(q, encoder());
    work.keys = heads_of(inputs[1], encoder());
    work.values = heads_of(inputs[2], encoder());
    if (inputs.size() > 3) {
      work.cos = static_cast<const float*>(elements_of(inputs[3], encoder()));
      work.sin = static_cast<const float*>(elements_of(inputs[4], encoder()));
      work.turns_differ = inputs[3].shape(0) != q.shape(1);
    }
    work.parts = parts_;
    work.batch = q.shape(0);
    work.rows = q.shape(1);
    work.heads = q.shape(2);
    work.kv = inputs[1].shape(2);
    work.dim = q.shape(3);
    work.scale = scale_;
    work.dtype = float_of(q);
    work.out = outputs[0].data<char>();
    encoder().dispatch([work] { work.run(); });
  }

  const char* name() const override {
    return "mlxinfer.patch_attention";
  }

 private:
  const float scale_;
  const int parts_;
};

mx::array patch_attention(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, const std::optional<mx::array>& cos,
    const std::optional<mx::array>& sin, int parts) {
  const char* op = "patch_attention";
  const std::string shapes = "queries " + dtype_text(q) + " " + shape_text(q.shape()) + ", keys " + dtype_text(k) + " " + shape_text(k.shape()) +
      " and values " + dtype_text(v) + " " + shape_text(v.shape());
  if (!is_floating(q) || q.dtype() != k.dtype() || k.dtype() != v.dtype() || q.ndim() != 4 || k.ndim() != 4 || k.shape() != v.shape()) {
    refuse(op, shapes + " must be floats of one dtype, [batch, rows, heads, dim].");
  }
  if (k.shape(0) != q.shape(0) || k.shape(1) != q.shape(1) || k.shape(3) != q.shape(3) || k.shape(2) == 0 || q.shape(2) % k.shape(2) != 0) {
    refuse(op, shapes + " do not belong together.");
  }
  std::vector<mx::array> inputs{q, k, v};
  if (cos.has_value() != sin.has_value()) {
    refuse(op, "cosines need sines.");
  }
  if (cos) {
    const auto own = [&](const mx::array& a) {
      return a.dtype() == mx::float32 && a.ndim() == 2 && a.shape(1) == q.shape(3) && (a.shape(0) == q.shape(1) || a.shape(0) == q.shape(0) * q.shape(1));
    };
    if (!own(*cos) || !own(*sin) || cos->shape() != sin->shape() || parts < 1 || q.shape(3) % (2 * parts) != 0) {
      refuse(op, "cosines and sines must be float32 [rows, dim] or [batch * rows, dim], and dim a multiple of twice the parts.");
    }
    inputs.push_back(*cos);
    inputs.push_back(*sin);
  }
  return mx::array(
      {q.shape(0) * q.shape(1), q.shape(2) * q.shape(3)}, q.dtype(), std::make_shared<PatchAttention>(cpu_stream(), scale, parts), std::move(inputs));
}

} // namespace

void bind_patch_attention(nb::module_& m) {
  m.def("patch_attention", &patch_attention, "queries"_a, "keys"_a, "values"_a, "scale"_a, "cos"_a.none(), "sin"_a.none(), "parts"_a);
}

} // namespace mlxinfer::cpu
