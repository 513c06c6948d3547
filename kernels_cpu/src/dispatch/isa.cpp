#include "dispatch/isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace mlxinfer::cpu {
namespace {

#define MLXINFER_NAMES_(macro, ...) macro(__VA_ARGS__)
#define MLXINFER_QUOTE_(a, b, c) {#a, #b, #c}
constexpr const char* kNames[] = MLXINFER_NAMES_(MLXINFER_QUOTE_, MLXINFER_ISAS);

#if defined(__x86_64__)
Level best() {
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  return avx512 ? Level::highest : avx2 ? Level::middle : Level::lowest;
}
#elif defined(__aarch64__) && defined(__linux__)
Level best() {
  constexpr unsigned long kDotProd = 1ul << 20, kI8mm = 1ul << 13; // HWCAP_ASIMDDP, HWCAP2_I8MM
  bool dotprod = getauxval(AT_HWCAP) & kDotProd;
  return dotprod && (getauxval(AT_HWCAP2) & kI8mm) ? Level::highest : dotprod ? Level::middle : Level::lowest;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
Level best() {
  bool dotprod = has("hw.optional.arm.FEAT_DotProd");
  return dotprod && has("hw.optional.arm.FEAT_I8MM") ? Level::highest : dotprod ? Level::middle : Level::lowest;
}
#else
Level best() {
  return Level::lowest;
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// The system saves the unit's registers only for processes that have asked.
bool may_use_matrix_unit() {
  constexpr unsigned kTileAndInt8 = 3u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool there = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTileAndInt8) == kTileAndInt8;
  return there && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool may_use_matrix_unit() {
  return false;
}
#endif

Level choose() {
  int most = static_cast<int>(best());
  const char* wanted = std::getenv("MLXINFER_CPU_ISA");
  for (int i = 0; wanted != nullptr && i < most; ++i) {
    if (std::strcmp(wanted, kNames[i]) == 0) {
      most = i;
    }
  }
  while (most >= 0 && !is_compiled(static_cast<Level>(most))) {
    --most;
  }
  return static_cast<Level>(most);
}

} // namespace

Level level() {
  static const Level chosen = choose();
  return chosen;
}

const char* isa_name() {
  return name_of(level());
}

const char* machine_isa() {
  return name_of(best());
}

bool is_compiled(Level level) {
  return level != Level::none && (MLXINFER_COMPILED >> static_cast<int>(level) & 1) != 0;
}

const char* name_of(Level level) {
  return level == Level::none ? "" : kNames[static_cast<int>(level)];
}

bool has_matrix_unit() {
  static const bool has = level() == Level::highest && std::getenv("MLXINFER_CPU_ISA") == nullptr && may_use_matrix_unit();
  return has;
}

} // namespace mlxinfer::cpu
