// Products of query rows, or of their weights, with the numbers of a page.

#include "attention/codes.h"
#include "attention/tile.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// A block of the product lies in kBlockRows * kColumns vector registers, beside kColumns and one more for the factors.
#if defined(__AVX512VNNI__) || defined(__aarch64__)
constexpr int kColumns = 4;
#else
constexpr int kColumns = 2;
#endif

// Memory to be read next, `step` bytes of it for each row of this product.
struct Ahead {
  const char* at;
  int64_t step;
};

// Columns `first` vectors behind those at b and c.
template <typename Numbers, int R, int Columns>
MLXINFER_INLINE void multiply_block(const PageProduct& p, const uint8_t* b, float* c, int first, Ahead& ahead) {
  F32 sums[R][Columns];
  MLXINFER_UNROLL
  for (int r = 0; r < R; ++r) {
    MLXINFER_UNROLL
    for (int j = 0; j < Columns; ++j) {
      F32 start = broadcast(p.add[r]);
      sums[r][j] = p.keep == nullptr ? start : fma(load(c + r * p.c_stride + (first + j) * kWidth), broadcast(p.keep[r]), start);
    }
  }
  const float* a = p.a;
  for (int64_t k = 0; k < p.depth; ++k, b += p.b_stride, ++a) {
    for (int64_t i = 0; i < ahead.step; i += 64) {
      __builtin_prefetch(ahead.at + i, 0, 0);
    }
    ahead.at += ahead.step;
    F32 row[Columns];
    MLXINFER_UNROLL
    for (int j = 0; j < Columns; ++j) {
      row[j] = Numbers::load(b, first + j);
    }
    MLXINFER_UNROLL
    for (int r = 0; r < R; ++r) {
      F32 factor = broadcast(a[r * p.a_stride]);
      MLXINFER_UNROLL
      for (int j = 0; j < Columns; ++j) {
        sums[r][j] = fma(factor, row[j], sums[r][j]);
      }
    }
  }
  MLXINFER_UNROLL
  for (int r = 0; r < R; ++r) {
    MLXINFER_UNROLL
    for (int j = 0; j < Columns; ++j) {
      store(c + r * p.c_stride + (first + j) * kWidth, sums[r][j]);
    }
  }
}

template <typename Numbers, int R>
void multiply_rows(const PageProduct& p) {
  constexpr int64_t columns = kColumns * kWidth;
  auto b = static_cast<const uint8_t*>(p.b);
  const int64_t passes = p.depth * ((p.width + columns - 1) / columns);
  Ahead ahead{static_cast<const char*>(p.soon), passes == 0 ? 0 : (p.soon_bytes + passes - 1) / passes};
  int64_t j = 0;
  for (; j + columns <= p.width; j += columns) {
    multiply_block<Numbers, R, kColumns>(p, b + Numbers::bytes(j), p.c + j, 0, ahead);
  }
  for (int i = 0; j + i * kWidth < p.width; ++i) {
    multiply_block<Numbers, R, 1>(p, b + Numbers::bytes(j), p.c + j, i, ahead);
  }
}

template <typename Numbers>
void multiply(const PageProduct& p) {
  switch (p.rows) {
    case 1:
      return multiply_rows<Numbers, 1>(p);
    case 2:
      return multiply_rows<Numbers, 2>(p);
    case 3:
      return multiply_rows<Numbers, 3>(p);
    case 4:
      return multiply_rows<Numbers, 4>(p);
    case 5:
      return multiply_rows<Numbers, 5>(p);
    default:
      return multiply_rows<Numbers, kBlockRows>(p);
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
using namespace MLXINFER_ISA;
MLXINFER_DEFINE_KERNELS(PageProductKernels, page_product_kernels) = {
    {multiply<Plain<float>>, multiply<Plain<Bfloat>>, multiply<Plain<Half>>, multiply<Codes<2>>, multiply<Codes<3>>, multiply<Codes<4>>,
     multiply<Codes<5>>, multiply<Codes<6>>, multiply<Codes<8>>}};
} // namespace mlxinfer::cpu
