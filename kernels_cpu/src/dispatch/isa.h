#pragma once

// Kernels are compiled once per instruction set, in files named *.kernels.cpp; which one runs is decided when the program starts. A build
// may lack sets: CMakeLists.txt names those that it has in MLXINFER_COMPILED, a bit each, and in MLXINFER_TABLES for those that it lacks
// another one, whose kernels are never called in its place.

#if defined(__x86_64__)
#define MLXINFER_ISAS portable, avx2, avx512
#elif defined(__aarch64__)
#define MLXINFER_ISAS portable, dotprod, i8mm
#else
#define MLXINFER_ISAS portable, portable, portable
#endif
#ifndef MLXINFER_TABLES
#define MLXINFER_TABLES MLXINFER_ISAS
#define MLXINFER_COMPILED 7
#endif

namespace mlxinfer::cpu {

// In rising order: each level includes the ones before it.
enum class Level { none = -1, lowest, middle, highest };

// The best compiled one that this machine has, at most the one named in `MLXINFER_CPU_ISA`; `none` if there is none, and then no kernel
// may run.
Level level();
// Its name; empty if there is none.
const char* isa_name();
// The name of the best one that this machine has, compiled or not.
const char* machine_isa();
bool is_compiled(Level level);
const char* name_of(Level level);

// Whether the machine multiplies small matrices of 8-bit integers at once (AMX) and the system lets this process. Part of the highest
// level, unless `MLXINFER_CPU_ISA` names one.
bool has_matrix_unit();

} // namespace mlxinfer::cpu

// `MLXINFER_DECLARE_KERNELS(Table, name)` in a header declares `const Table& name()`: function pointers for this machine. The
// *.kernels.cpp file, compiled once per instruction set, defines them: `MLXINFER_DEFINE_KERNELS(Table, name) = {...};`.
#define MLXINFER_DECLARE_KERNELS(Table, name) MLXINFER_EXPAND_(MLXINFER_DECLARE_THREE_, Table, name, MLXINFER_TABLES)
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
