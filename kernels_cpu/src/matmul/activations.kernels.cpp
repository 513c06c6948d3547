#include "matmul/activations.h"

#include "matmul/layout.h"
#include "norm/mean_square.h"
#include "simd/floats.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr int kVectors = kBlockColumns / kWidth; // of a block
typedef int8_t I8Lanes __attribute__((vector_size(MLXINFER_WIDTH)));

bool is_finite(const float* x, int64_t size) {
  U32 most = {};
  for_lanes(size, [&](auto load, auto, int64_t i) {
    U32 magnitude = (U32)load(x + i) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  });
  for (int lane = 0; lane < kWidth; ++lane) {
    if (most[lane] >= 0x7f800000u) {
      return false;
    }
  }
  return true;
}

template <typename T>
bool load_row(const void* x, const void* weight, float eps, int64_t size, int64_t padded, float* out) {
  auto from = static_cast<const T*>(x), gain = static_cast<const T*>(weight);
  const float factor = gain ? 1.0f / __builtin_sqrtf(mean_square(from, size) + eps) : 1.0f;
  for_lanes(size, [=](auto load, auto store, int64_t i) {
    F32 v = load(from + i);
    store(out + i, gain ? v * factor * load(gain + i) : v);
  });
  for (int64_t i = size; i < padded; ++i) {
    out[i] = 0;
  }
  return is_finite(out, size);
}

// 32 columns to four-byte steps `stride` bytes apart.
MLXINFER_INLINE void scatter(const int8_t* codes, int8_t* to, int64_t stride) {
  for (int i = 0; i < 8; ++i) {
    memcpy(to + i * stride, codes + 4 * i, 4);
  }
}

template <int Planes>
void quantize(
    const float* x, int64_t blocks, int rows, int m, bool by_rows, int8_t* q, float* scales, float* sums, float* half_sums, int32_t* code_sums) {
  constexpr float limit = Planes == 1 ? 127.0f : 127.0f * 128.0f;
  const int64_t row = by_rows ? kBlockColumns : 4, step = by_rows ? 4 : int64_t{4} * rows;
  for (int64_t b = 0; b < blocks; ++b, x += kBlockColumns) {
    F32 values[kVectors], most = {};
    for (int i = 0; i < kVectors; ++i) {
      values[i] = load(x + i * kWidth);
      most = max(most, abs(values[i]));
    }
    const float top = max_across(most);
    const bool counts = top > 1e-30f; // below, the scale would lose its precision
    const float inverse = counts ? limit / top : 0.0f, scale = counts ? top / limit : 0.0f;
    int8_t codes[2][kBlockColumns];
    I32 halves[2] = {};
    for (int i = 0; i < kVectors; ++i) {
      I32 code = (I32)(values[i] * inverse + 12582912.0f) - 0x4b400000; // 1.5 * 2^23: rounds to an integer in the low bits
      halves[i / (kVectors / 2)] += code;
      I32 high = (code + 64) >> 7;
      I32 first = Planes == 1 ? code : high;
      store_bits(codes[0] + i * kWidth, __builtin_convertvector(first, I8Lanes));
      if (Planes == 2) {
        store_bits(codes[1] + i * kWidth, __builtin_convertvector(code - (high << 7), I8Lanes));
      }
    }
    for (int plane = 0; plane < Planes; ++plane) {
      scatter(codes[plane], q + (b * Planes + plane) * kBlockColumns * rows + m * row, step);
    }
    const int32_t first = sum_across(halves[0]), second = sum_across(halves[1]);
    code_sums[2 * b * rows + m] = first;
    code_sums[(2 * b + 1) * rows + m] = second;
    half_sums[2 * b * rows + m] = scale * static_cast<float>(first);
    half_sums[(2 * b + 1) * rows + m] = scale * static_cast<float>(second);
    scales[b * rows + m] = scale;
    sums[b * rows + m] = scale * static_cast<float>(first + second);
  }
}

template <int Planes>
void quantize_nests(
    const float* x, int64_t nests, int rows, int m, bool by_rows, bool halves, int zero, int8_t* q, float* scales, float* sums, int32_t* starts) {
  constexpr float limit = Planes == 1 ? 127.0f : 127.0f * 256.0f + 127.0f;
  constexpr int parts = kNestColumns / kBlockColumns;
  for (int64_t nest = 0; nest < nests; ++nest, x += kNestColumns) {
    F32 most = {};
    for (int i = 0; i < kNestColumns; i += kWidth) {
      most = max(most, abs(load(x + i)));
    }
    const float top = max_across(most);
    const bool counts = top > 1e-30f; // below, the scale would lose its precision
    const float inverse = counts ? limit / top : 0.0f, scale = counts ? top / limit : 0.0f;
    scales[nest * rows + m] = scale;
    for (int part = 0; part < parts; ++part) {
      const int64_t b = nest * parts + part;
      int8_t codes[2][kBlockColumns];
      I32 of_half[2][2] = {}; // [half][plane]
      for (int i = 0; i < kVectors; ++i) {
        I32 code = (I32)(load(x + part * kBlockColumns + i * kWidth) * inverse + 12582912.0f) - 0x4b400000; // as above
        I32 high = Planes == 1 ? code : (code + 128) >> 8, low = code - (high << 8);
        I32(&half)[2] = of_half[i / (kVectors / 2)];
        half[0] += high;
        half[1] += low;
        store_bits(codes[0] + i * kWidth, __builtin_convertvector(high, I8Lanes));
        store_bits(codes[1] + i * kWidth, __builtin_convertvector(low, I8Lanes));
      }
      for (int plane = 0; plane < Planes; ++plane) {
        if (by_rows) { // [nests][parts / 2][planes][rows][64]
          memcpy(q + (((b / 2) * Planes + plane) * rows + m) * 2 * kBlockColumns + b % 2 * kBlockColumns, codes[plane], kBlockColumns);
        } else {
          scatter(codes[plane], q + (b * Planes + plane) * kBlockColumns * rows + m * 4, int64_t{4} * rows);
        }
      }
      for (int g = 0; g < (halves ? 2 : 1); ++g) {
        int32_t of_plane[2];
        for (int plane = 0; plane < 2; ++plane) {
          of_plane[plane] = sum_across(halves ? of_half[g][plane] : of_half[0][plane] + of_half[1][plane]);
        }
        const int64_t group = halves ? 2 * b + g : b;
        sums[group * rows + m] = scale * static_cast<float>(Planes == 1 ? of_plane[0] : of_plane[0] * 256 + of_plane[1]);
        for (int plane = 0; plane < Planes; ++plane) {
          starts[(group * Planes + plane) * rows + m] = -zero * of_plane[plane];
        }
      }
    }
  }
}

void place(const float* x, int64_t blocks, int rows, int m, float* tile, float* sums) {
  for (int64_t b = 0; b < blocks; ++b, x += kBlockColumns) {
    F32 halves[2] = {};
    for (int i = 0; i < kVectors; ++i) {
      halves[i / (kVectors / 2)] += load(x + i * kWidth);
    }
    sums[2 * b * rows + m] = sum_across(halves[0]);
    sums[(2 * b + 1) * rows + m] = sum_across(halves[1]);
    float* to = tile + b * kBlockColumns * rows + m;
    for (int i = 0; i < kBlockColumns; ++i) {
      to[i * rows] = x[i];
    }
  }
}

template <Gate G>
MLXINFER_INLINE F32 activate(F32 x) {
  if constexpr (G == Gate::silu) {
    return x * sigmoid(x);
  } else {
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); // 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  }
}

template <typename T>
void finish(const float* x, int columns, const void* bias, const void* residual, void* out) {
  auto b = static_cast<const T*>(bias), r = static_cast<const T*>(residual);
  auto y = static_cast<T*>(out);
  for_lanes(columns, [=](auto load, auto store, int64_t i) {
    F32 v = load(x + i);
    v = b ? v + load(b + i) : v;
    v = r ? v + load(r + i) : v;
    store(y + i, v);
  });
}

template <typename T, Gate G>
void finish_gated(const float* x, const float* up, int columns, const void* bias, const void* up_bias, void* out) {
  auto b = static_cast<const T*>(bias), ub = static_cast<const T*>(up_bias);
  auto y = static_cast<T*>(out);
  for_lanes(columns, [=](auto load, auto store, int64_t i) {
    F32 v = load(x + i), u = load(up + i);
    v = b ? v + load(b + i) : v;
    u = ub ? u + load(ub + i) : u;
    store(y + i, activate<G>(v) * u);
  });
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_GATED_(T) {MLXINFER_ISA::finish_gated<T, Gate::silu>, MLXINFER_ISA::finish_gated<T, Gate::gelu_tanh>}
MLXINFER_DEFINE_KERNELS(ActivationKernels, activation_kernels) = {
    {MLXINFER_ISA::load_row<float>, MLXINFER_ISA::load_row<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::load_row<MLXINFER_ISA::Half>},
    {MLXINFER_ISA::quantize<1>, MLXINFER_ISA::quantize<2>},
    {MLXINFER_ISA::quantize_nests<1>, MLXINFER_ISA::quantize_nests<2>},
    MLXINFER_ISA::place};
MLXINFER_DEFINE_KERNELS(FinishKernels, finish_kernels) = {
    {MLXINFER_ISA::finish<float>, MLXINFER_ISA::finish<MLXINFER_ISA::Bfloat>, MLXINFER_ISA::finish<MLXINFER_ISA::Half>},
    {MLXINFER_GATED_(float), MLXINFER_GATED_(MLXINFER_ISA::Bfloat), MLXINFER_GATED_(MLXINFER_ISA::Half)}};
}
