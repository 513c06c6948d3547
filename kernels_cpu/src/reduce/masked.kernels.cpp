#include "reduce/masked.h"

#include "simd/floats.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr int64_t kBits = 32;

void row(const float* x, const uint32_t* words, int64_t size, float* out) {
  U32 places;
  for (int lane = 0; lane < kWidth; ++lane) {
    places[lane] = static_cast<uint32_t>(lane);
  }
  const F32 least = broadcast(-__builtin_inff());
  int64_t i = 0;
  for (; i + kBits <= size; i += kBits) {
    const uint32_t word = words[i / kBits];
    MLXINFER_UNROLL
    for (int64_t j = 0; j < kBits; j += kWidth) {
      const U32 bits = (broadcast(word) >> (places + static_cast<uint32_t>(j))) & 1u;
      store(out + i + j, bits != 0u ? load(x + i + j) : least);
    }
  }
  for (; i < size; ++i) {
    out[i] = (words[i / kBits] >> (i % kBits)) & 1u ? x[i] : -__builtin_inff();
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(MaskedKernels, masked_kernels) = {MLXINFER_ISA::row};
}
