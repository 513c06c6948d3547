#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/weight_file.h"
#include "op/refuse.h"
#include "op/rows.h"

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mlxinfer::cpu {

namespace mx = mlx::core;

// An operation on MLX's CPU stream. `eval_cpu` allocates the outputs (`allocate`) and hands a task with plain pointers to
// `encoder().dispatch`; MLX keeps inputs, outputs and the encoder's temporaries alive until that task has run.
class Operation : public mx::Primitive {
 public:
  explicit Operation(mx::Stream stream) : Primitive(stream) {}
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;

 protected:
  mx::cpu::CommandEncoder& encoder() {
    return mx::cpu::get_command_encoder(stream());
  }
};

// The stream for new operations: the default one where it is on the CPU, otherwise the CPU's.
mx::Stream cpu_stream();

void allocate(mx::array& out);

// An evaluated array in weight memory (memory/slabs.h).
mx::array aligned_array(const mx::Shape& shape, mx::Dtype dtype);

// An evaluated array that lies in a file, its first number at a multiple of 64 bytes and its size in bytes in the eight before, as in
// weight memory. Throws std::invalid_argument where the file has no such array there.
mx::array array_in(const std::shared_ptr<WeightFile>& file, size_t offset, const mx::Shape& shape, mx::Dtype dtype);
// Whether MLX's buffers are such that there can be arrays in files.
bool can_map_weights();

// All but the last axis taken together. Views whose rows lie at equal distances are used as they are; anything else is copied by a task.
Rows rows_of(const mx::array& a, mx::cpu::CommandEncoder& encoder);

// Contiguous elements: the array itself or a copy made by a task.
const void* elements_of(const mx::array& a, mx::cpu::CommandEncoder& encoder);

bool is_floating(const mx::array& a); // float32, bfloat16 or float16

std::string shape_text(const mx::Shape& shape);
std::string dtype_text(const mx::array& a);

Float float_of(const mx::array& a);

} // namespace mlxinfer::cpu
