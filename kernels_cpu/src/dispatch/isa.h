#pragma once

// Kernels are compiled once per instruction set, in files named *.kernels.cpp; which one runs is decided when the program starts.

#if defined(__x86_64__)
#define MLXINFER_ISAS portable, avx2, avx512
#elif defined(__aarch64__)
#define MLXINFER_ISAS portable, dotprod, i8mm
#else
#define MLXINFER_ISAS portable, portable, portable
#endif

namespace mlxinfer::cpu {

// In rising order: each level includes the ones before it.
enum class Level { lowest, middle, highest };

// The best that this machine has, or a lower one named in `MLXINFER_CPU_ISA`.
Level level();
const char* isa_name();

// Whether the machine multiplies small matrices of 8-bit integers at once (AMX) and the system lets this process. Part of the highest
// level, unless `MLXINFER_CPU_ISA` names one.
bool has_matrix_unit();

} // namespace mlxinfer::cpu

// `MLXINFER_DECLARE_KERNELS(Table, name)` in a header declares `const Table& name()`: function pointers for this machine. The
// *.kernels.cpp file, compiled once per instruction set, defines them: `MLXINFER_DEFINE_KERNELS(Table, name) = {...};`.
#define MLXINFER_DECLARE_KERNELS(Table, name) MLXINFER_EXPAND_(MLXINFER_DECLARE_THREE_, Table, name, MLXINFER_ISAS)
#define MLXINFER_EXPAND_(macro, ...) macro(__VA_ARGS__)
#define MLXINFER_DECLARE_THREE_(Table, name, lowest_isa, middle_isa, highest_isa) \
  namespace lowest_isa {                                                          \
  extern const Table name##_table;                                                \
  }                                                                               \
  namespace middle_isa {                                                          \
  extern const Table name##_table;                                                \
  }                                                                               \
  namespace highest_isa {                                                         \
  extern const Table name##_table;                                                \
  }                                                                               \
  inline const Table& name() {                                                    \
    switch (level()) {                                                            \
      case Level::highest:                                                        \
        return highest_isa::name##_table;                                         \
      case Level::middle:                                                         \
        return middle_isa::name##_table;                                          \
      default:                                                                    \
        return lowest_isa::name##_table;                                          \
    }                                                                             \
  }
#define MLXINFER_DEFINE_KERNELS(Table, name) const Table MLXINFER_ISA::name##_table
