#include "op/op.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/device.h"
#include "mlx/stream.h"
#include "mlx/utils.h"

#include "memory/slabs.h"

namespace mlxinfer::cpu {
namespace {

// Copies any strided array of items of `size` bytes to contiguous memory.
void copy_strided(const char* from, char* to, const mx::Shape& shape, const mx::Strides& strides, size_t size) {
  size_t axes = shape.size();
  if (axes == 0) {
    std::memcpy(to, from, size);
    return;
  }
  mx::Shape index(axes, 0);
  const int64_t last = shape[axes - 1], step = strides[axes - 1] * static_cast<int64_t>(size);
  for (;;) {
    const char* item = from;
    for (int64_t i = 0; i < last; ++i, item += step, to += size) {
      std::memcpy(to, item, size);
    }
    int axis = static_cast<int>(axes) - 2;
    for (; axis >= 0; --axis) {
      from += strides[axis] * static_cast<int64_t>(size);
      if (++index[axis] < shape[axis]) {
        break;
      }
      from -= strides[axis] * static_cast<int64_t>(size) * shape[axis];
      index[axis] = 0;
    }
    if (axis < 0) {
      return;
    }
  }
}

const void* copied(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  allocate(copy);
  encoder.dispatch([from = a.data<char>(), to = copy.data<char>(), shape = a.shape(), strides = a.strides(), size = a.itemsize()] {
    copy_strided(from, to, shape, strides, size);
  });
  const void* data = copy.data<char>();
  encoder.add_temporary(std::move(copy));
  return data;
}

// The distance of neighbouring rows where it is the same everywhere; 0 for a broadcast row.
std::optional<int64_t> row_stride(const mx::array& a) {
  int axes = static_cast<int>(a.ndim());
  if (a.shape(axes - 1) > 1 && a.strides(axes - 1) != 1) {
    return std::nullopt;
  }
  std::optional<int64_t> stride;
  int64_t expected = 0;
  for (int axis = axes - 2; axis >= 0; --axis) {
    if (a.shape(axis) == 1) {
      continue;
    }
    if (!stride) {
      stride = a.strides(axis);
    } else if (a.strides(axis) != expected) {
      return std::nullopt;
    }
    expected = a.strides(axis) * a.shape(axis);
  }
  return stride.value_or(a.shape(axes - 1));
}

size_t bytes_of(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (auto size : shape) {
    bytes *= static_cast<size_t>(size);
  }
  return bytes;
}

} // namespace

void Operation::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error(std::string("[") + name() + "] runs on the CPU only.");
}

mx::Stream cpu_stream() {
  return mx::default_device() == mx::Device::cpu ? mx::default_stream(mx::default_device()) : mx::default_stream(mx::Device::cpu);
}

void allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
}

bool can_map_weights() {
  // On the CPU an MLX buffer is a size followed by the data. Elsewhere its memory comes from MLX.
  size_t probe[2] = {0, 0};
  return static_cast<char*>(mx::allocator::Buffer(probe).raw_ptr()) - reinterpret_cast<char*>(probe) == sizeof(size_t);
}

mx::array aligned_array(const mx::Shape& shape, mx::Dtype dtype) {
  const size_t bytes = bytes_of(shape, dtype);
  if (!can_map_weights()) {
    return mx::array(mx::allocator::malloc(bytes), shape, dtype);
  }
  Place place = weight_memory(kAlignment + bytes);
  char* buffer = place.memory + kAlignment - sizeof(size_t);
  std::memcpy(buffer, &bytes, sizeof(bytes));
  return mx::array(mx::allocator::Data(mx::allocator::Buffer(buffer), [slab = place.slab](mx::allocator::Buffer) {}), shape, dtype);
}

mx::array array_in(const std::shared_ptr<WeightFile>& file, size_t offset, const mx::Shape& shape, mx::Dtype dtype) {
  const size_t bytes = bytes_of(shape, dtype), end = file->size();
  size_t noted = 0;
  if (offset >= kAlignment && offset <= end) {
    std::memcpy(&noted, file->memory() + offset - sizeof(noted), sizeof(noted));
  }
  if (!can_map_weights() || offset < kAlignment || offset % kAlignment != 0 || offset > end || bytes > end - offset || noted != bytes) {
    refuse("pack", "the file has no array of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + ".");
  }
  // MLX never writes to an array that another one holds, and weights are held by their model.
  char* buffer = const_cast<char*>(file->memory()) + offset - sizeof(size_t);
  return mx::array(mx::allocator::Data(mx::allocator::Buffer(buffer), [file](mx::allocator::Buffer) {}), shape, dtype);
}

Rows rows_of(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  int64_t size = a.shape(-1), count = size == 0 ? 0 : static_cast<int64_t>(a.size()) / size;
  if (a.size() == 0) {
    return {nullptr, count, size, size};
  }
  const auto stride = row_stride(a);
  return stride ? Rows{a.data<char>(), count, size, *stride} : Rows{copied(a, encoder), count, size, size};
}

const void* elements_of(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  return a.flags().row_contiguous || a.size() == 0 ? a.data<char>() : copied(a, encoder);
}

bool is_floating(const mx::array& a) {
  return a.dtype() == mx::float32 || a.dtype() == mx::bfloat16 || a.dtype() == mx::float16;
}

std::string shape_text(const mx::Shape& shape) {
  std::string text;
  for (auto size : shape) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + text + "]";
}

std::string dtype_text(const mx::array& a) {
  std::ostringstream text;
  text << a.dtype();
  return text.str();
}

Float float_of(const mx::array& a) {
  return a.dtype() == mx::float32 ? Float::f32 : a.dtype() == mx::bfloat16 ? Float::bf16 : Float::f16;
}

} // namespace mlxinfer::cpu
