// A head of queries or keys on its way to attention.

#include "attention/head.h"
#include "simd/floats.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

template <typename T>
void prepare(const void* from, int64_t dim, const void* norm, float eps, const float* turn, int64_t half, float scale, float* to) {
  auto x = static_cast<const T*>(from);
  if (norm == nullptr) {
    for_lanes(dim, [=](auto load, auto store, int64_t i) { store(to + i, load(x + i) * scale); });
  } else {
    F32 squares = {};
    for_lanes(dim, [&](auto load, auto, int64_t i) {
      F32 v = load(x + i);
      squares = fma(v, v, squares);
    });
    const float mean = sum_across(squares) / static_cast<float>(dim);
    const float factor = scale / __builtin_sqrtf(mean + eps);
    auto weight = static_cast<const T*>(norm);
    for_lanes(dim, [=](auto load, auto store, int64_t i) { store(to + i, load(x + i) * factor * load(weight + i)); });
  }
  for_lanes(half, [=](auto load, auto store, int64_t i) {
    F32 low = load(to + i), high = load(to + half + i), cosine = load(turn + i), sine = load(turn + half + i);
    store(to + i, fma(low, cosine, -(high * sine)));
    store(to + half + i, fma(high, cosine, low * sine));
  });
}

template <typename From, typename To>
void convert(const void* from, int64_t size, void* to) {
  for_lanes(size, [=](auto load, auto store, int64_t i) { store(static_cast<To*>(to) + i, load(static_cast<const From*>(from) + i)); });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(HeadKernels, head_kernels) = {
    {prepare<float>, prepare<Bfloat>, prepare<Half>},
    {{convert<float, float>, convert<float, Bfloat>, convert<float, Half>},
     {convert<Bfloat, float>, convert<Bfloat, Bfloat>, convert<Bfloat, Half>},
     {convert<Half, float>, convert<Half, Bfloat>, convert<Half, Half>}}};
} // namespace mlxinfer::cpu
