// Products of query rows, or of their weights, with the numbers of a page.

#include "attention/codes.h"
#include "attention/tile.h"

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

// A block of the product lies in `rows` times this many vector registers, beside as many and one more for the factors. Few rows wait for
// memory, and two lines of it at a time come faster than four.
constexpr int columns_of([[maybe_unused]] int rows) {
#if defined(__AVX512VNNI__)
  return rows > 2 && rows < kBlockRows ? 2 : 4;
#elif defined(__aarch64__)
  return 4;
#else
  return 2;
#endif
}

// Bytes of b, or at least rows, whose columns are all read before the next ones: memory is then read nearly in order.
constexpr int64_t kChunkBytes = 2048, kChunkRows = 8;

constexpr int64_t kLine = 64;
constexpr int64_t kColdLines = 48; // from a line of b to the one that is prefetched meanwhile

// Memory to be read soon, `step` bytes of it for each row of each block of columns. Lines go to the second cache: a page may exceed the first.
struct Ahead {
  const char* at;
  int64_t step;

  MLXINFER_INLINE void prefetch() {
    for (int64_t i = 0; i < step; i += kLine) {
      __builtin_prefetch(at + i, 0, 1);
    }
    at += step;
  }
};

// Rows [from, to) of b, where earlier ones are in c already; columns `first` vectors behind those at b and c.
template <typename Numbers, int R, int Columns>
MLXINFER_INLINE void multiply_block(const PageProduct& p, const uint8_t* b, int64_t from, int64_t to, float* c, int first, Ahead& own, Ahead& soon) {
  F32 sums[R][Columns];
  MLXINFER_UNROLL
  for (int r = 0; r < R; ++r) {
    MLXINFER_UNROLL
    for (int j = 0; j < Columns; ++j) {
      const float* before = c + r * p.c_stride + (first + j) * kWidth;
      if (from > 0) {
        sums[r][j] = load(before);
      } else {
        F32 start = broadcast(p.add[r]);
        sums[r][j] = p.keep == nullptr ? start : fma(load(before), broadcast(p.keep[r]), start);
      }
    }
  }
  const float* a = p.a + from;
  b += from * p.b_stride;
  for (int64_t k = from; k < to; ++k, b += p.b_stride, ++a) {
    own.prefetch();
    soon.prefetch();
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
  constexpr int vectors = columns_of(R);
  constexpr int64_t columns = vectors * kWidth;
  auto b = static_cast<const uint8_t*>(p.b);
  const int64_t passes = p.depth * ((p.width + columns - 1) / columns);
  auto each = [passes](int64_t bytes) { return passes == 0 ? 0 : (bytes + passes - 1) / passes; };
  Ahead own{static_cast<const char*>(p.b) + kColdLines * kLine, p.cold ? each(p.b_stride * p.depth) : 0};
  Ahead soon{static_cast<const char*>(p.soon), each(p.soon_bytes)};
  const int64_t least = kChunkBytes / Numbers::bytes(p.width), few = least > kChunkRows ? least : kChunkRows;
  const int64_t chunk = own.step > 0 || soon.step > 0 ? few : p.depth + 1; // what is not prefetched is in a cache already
  for (int64_t from = 0; from == 0 || from < p.depth; from += chunk) {
    const int64_t to = from + chunk < p.depth ? from + chunk : p.depth;
    int64_t j = 0;
    for (; j + columns <= p.width; j += columns) {
      multiply_block<Numbers, R, vectors>(p, b + Numbers::bytes(j), from, to, p.c + j, 0, own, soon);
    }
    for (int i = 0; j + i * kWidth < p.width; ++i) {
      multiply_block<Numbers, R, 1>(p, b + Numbers::bytes(j), from, to, p.c + j, i, own, soon);
    }
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
