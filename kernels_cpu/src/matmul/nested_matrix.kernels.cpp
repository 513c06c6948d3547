#include "matmul/matrix.h"

#include "matmul/dot.h"
#include "matmul/nest.h"
#include "matmul/matrix_unit.h"
#include "matmul/tile.h"

#if defined(__AVX512VNNI__) && defined(__linux__) && __has_include(<amxint8intrin.h>)

namespace mlxinfer::cpu::MLXINFER_ISA {
namespace {

constexpr int kRows = kLargestTile;
constexpr int kTileBytes = 1024, kTileSteps = 4; // tiles of 64 columns to 256
constexpr int kRowsPerStep = kRows / kTileSteps;

constexpr TileConfiguration configuration() {
  TileConfiguration c{1, 0, {}, {}, {}};
  for (int i = 0; i < 8; ++i) {
    c.rows[i] = kRows;
    c.row_bytes[i] = 64;
  }
  return c;
}

// The sums of 256 columns with two operands, which are two panels, or the two bytes of one panel's codes.
typedef int32_t Sums[2][2][kRows][kPanelRows]; // [operand][plane]

// 256 columns of a tile of rows and of the operands.
struct Place {
  int64_t nest, tile;
};

template <Code C, int Planes>
class Tiles {
 public:
  static constexpr int kBytes = nested_bytes(C), kGroups = kNestBlocks * (has_halves(C) ? 2 : 1);

  // Two panels, or with codes of two bytes the first one alone.
  Tiles(const SpreadPanel* panels, const NestedTile& x, int64_t tiles, float* out)
      : panels_(panels), x_(x), blocks_(panels->block_count), tiles_(tiles), out_(out) {}

  MLXINFER_AMX void run() const {
    alignas(64) Sums held[2];
    Place now{0, 0}, before{0, 0};
    const int64_t places = tiles_ * (blocks_ / kNestBlocks);
    for (int64_t i = 0; i <= places; ++i) {
      // What is stored takes long until it can be read: sums are added while the next ones are multiplied.
      if (i < places) {
        _tile_zero(4);
        _tile_zero(5);
        _tile_zero(6);
        _tile_zero(7);
      }
      MLXINFER_UNROLL
      for (int step = 0; step < kTileSteps; ++step) {
        if (i < places) {
          multiply(now, step);
        }
        if (i > 0) {
          add(before, held[(i - 1) % 2], step * kRowsPerStep);
        }
      }
      if (i < places) {
        store_sums(held[i % 2]);
      }
      before = now;
      if (++now.tile == tiles_) { // the codes stay in the first cache for all tiles
        now = {now.nest + 1, 0};
      }
    }
  }

 private:
  // Plane 0 of x times the operands is in registers 4 and 6, plane 1 in 5 and 7.
  MLXINFER_AMX MLXINFER_INLINE void multiply(Place at, int step) const {
    const int64_t index = (at.nest * kTileSteps + step) * kTileBytes;
    const uint8_t* first = panels_[0].codes + index * kBytes;
    const uint8_t* second = kBytes == 2 ? first + kTileBytes : panels_[1].codes + index;
    const int8_t* q = x_.q + at.tile * Planes * kRows * blocks_ * kBlockColumns + index * Planes;
    _tile_loadd(0, first, 64);
    _tile_loadd(1, q, 64);
    _tile_dpbssd(4, 1, 0);
    if constexpr (Planes == 2) {
      _tile_loadd(2, q + kTileBytes, 64);
      _tile_dpbssd(5, 2, 0);
    }
    _tile_loadd(3, second, 64);
    _tile_dpbssd(6, 1, 3);
    if constexpr (Planes == 2) {
      _tile_dpbssd(7, 2, 3);
    }
  }

  MLXINFER_AMX MLXINFER_INLINE static void store_sums(Sums& sums) {
    _tile_stored(4, sums[0][0], 64);
    _tile_stored(6, sums[1][0], 64);
    if constexpr (Planes == 2) {
      _tile_stored(5, sums[0][1], 64);
      _tile_stored(7, sums[1][1], 64);
    }
  }

  // What nested.kernels.cpp does with the sums, for rows from `row` on.
  MLXINFER_INLINE void add(Place at, const Sums& sums, int row) const {
    for (int panel = 0; panel < 3 - kBytes; ++panel) {
      const float* scales = panels_[panel].scales + at.nest * nested_scales(C);
      float* out = out_ + ((panel * tiles_ + at.tile) * kRows + row) * kPanelRows;
      F32 total[kRowsPerStep];
      MLXINFER_UNROLL
      for (int m = 0; m < kRowsPerStep; ++m) {
        total[m] = at.nest == 0 ? F32{} : load(out + m * kPanelRows);
      }
      if constexpr (nest_has_biases(C)) {
        const float* of_groups = x_.sums + (at.tile * (blocks_ / kNestBlocks) + at.nest) * kGroups * kRows + row;
        MLXINFER_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          const F32 bias = load(scales + (1 + g) * kPanelRows);
          MLXINFER_UNROLL
          for (int m = 0; m < kRowsPerStep; ++m) {
            total[m] = fma(bias, broadcast(of_groups[g * kRows + m]), total[m]);
          }
        }
      }
      const F32 unit = load(scales);
      const float* steps = x_.scales + at.tile * blocks_ * kRows + at.nest * kRows + row;
      MLXINFER_UNROLL
      for (int m = 0; m < kRowsPerStep; ++m) {
        const F32 sum = nest_sum<Planes>(of_plane(sums, panel, 0, row + m), of_plane(sums, panel, Planes - 1, row + m));
        store(out + m * kPanelRows, fma(sum, unit * steps[m], total[m]));
      }
    }
  }

  MLXINFER_INLINE static I32 of_plane(const Sums& sums, int panel, int plane, int row) {
    const I32 first = load_bits<I32>(sums[kBytes == 2 ? 0 : panel][plane][row]);
    return kBytes == 1 ? first : (first << 8) + load_bits<I32>(sums[1][plane][row]);
  }

  const SpreadPanel* panels_;
  const NestedTile& x_;
  const int64_t blocks_, tiles_;
  float* out_;
};

template <Code C, int Planes>
MLXINFER_AMX void tiles(const SpreadPanel* panels, const NestedTile& x, int64_t count, float* out) {
  static constexpr TileConfiguration shapes = configuration();
  // Compilers believe that the intrinsic reads eight bytes.
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
  Tiles<C, Planes>(panels, x, count, out).run();
  if constexpr (nested_bytes(C) == 2) {
    Tiles<C, Planes>(panels + 1, x, count, out + count * kRows * kPanelRows).run();
  }
  _tile_release();
}

// Codes times their group's scale, in bytes. Those of Q3_K are from -124 to 128 and change their sign for it, as does what they are multiples of.
template <Code C>
MLXINFER_INLINE void put(U32 codes, U32 scale, uint8_t* to) {
  constexpr int16_t zero = C == Code::halves3 ? 4 : C == Code::halves6 ? 32 : 0, half = 128;
  typedef int16_t I16 __attribute__((vector_size(64)));
  const I16 factor = (I16)scale;
  const I16 even = ((I16)(codes & 0x00ff00ffu) - zero) * factor, odd = ((I16)((codes >> 8) & 0x00ff00ffu) - zero) * factor;
  const U32 low = ((U32)even & 0x00ff00ffu) | ((U32)odd << 8 & 0xff00ff00u);
  if constexpr (nested_bytes(C) == 1) {
    store_bits(to, low);
  } else {
    store_bits(to, ((U32)((even + half) >> 8) & 0x00ff00ffu) | ((U32)(odd + half) & 0xff00ff00u));
    store_bits(to + kTileBytes, low);
  }
}

template <Code C>
void spread(const Panel& panel, const SpreadPanel& to) {
  using Form = Integers<C>;
  constexpr int groups = has_halves(C) ? 2 : 1, bytes = nested_bytes(C);
  NestHeaders<C> headers(panel.headers, 0);
  float* scales = to.scales;
  for (int64_t b = 0; b < panel.block_count; ++b) {
    if (b % kNestBlocks == 0) {
      const F32 unit = headers.enter();
      store(scales, C == Code::halves3 ? -unit : unit);
      scales += kPanelRows;
    }
    const Codes codes = Form::unpack(panel.blocks + b * Form::kBits * 64, 0);
    uint8_t* block = to.codes + b / 2 * bytes * kTileBytes + b % 2 * (kTileBytes / 2);
    MLXINFER_UNROLL
    for (int g = 0; g < groups; ++g) {
      const I32 count = headers.scale();
      const U32 low = (U32)(C == Code::halves3 ? -count : count) & 0xffffu, both = low | low << 16;
      if constexpr (nest_has_biases(C)) {
        store(scales, headers.bias());
        scales += kPanelRows;
      }
      MLXINFER_UNROLL
      for (int i = g * 8 / groups; i < (g + 1) * 8 / groups; ++i) {
        put<C>(codes.v[i], both, block + i * 64);
      }
    }
  }
}

} // namespace
} // namespace mlxinfer::cpu::MLXINFER_ISA

namespace mlxinfer::cpu {
#define MLXINFER_EACH_CODE_(kernel, ...)                                                                                             \
  {nullptr, nullptr, nullptr, MLXINFER_ISA::kernel<Code::affine4 __VA_ARGS__>, MLXINFER_ISA::kernel<Code::affine5 __VA_ARGS__>,      \
   nullptr, nullptr, MLXINFER_ISA::kernel<Code::halves2 __VA_ARGS__>, MLXINFER_ISA::kernel<Code::halves3 __VA_ARGS__>,               \
   MLXINFER_ISA::kernel<Code::halves6 __VA_ARGS__>, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}
MLXINFER_DEFINE_KERNELS(NestedMatrixKernels, nested_matrix_kernels) = {
    MLXINFER_EACH_CODE_(spread), {MLXINFER_EACH_CODE_(tiles, , 1), MLXINFER_EACH_CODE_(tiles, , 2)}};
}

#else
namespace mlxinfer::cpu {
MLXINFER_DEFINE_KERNELS(NestedMatrixKernels, nested_matrix_kernels) = {};
}
#endif
