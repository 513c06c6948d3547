#pragma once

// Vectors of the native width for *.kernels.cpp files. Arithmetic is that of the compilers' vector extensions (+, *, <<, ...),
// products are contracted to fused multiply-adds; only what these lack is spelt out per instruction set.
//
// Kernel files include nothing else but C headers: an inline function of the standard library compiled here could be
// the one that the linker keeps for code that must run on every machine.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__)
#define MLXINFER_WIDTH 16
#elif defined(__AVX2__)
#define MLXINFER_WIDTH 8
#else
#define MLXINFER_WIDTH 4
#endif

#if defined(__clang__)
#define MLXINFER_UNROLL _Pragma("clang loop unroll(full)")
#define MLXINFER_ROLL _Pragma("clang loop unroll(disable)")
#else
#define MLXINFER_UNROLL _Pragma("GCC unroll 64")
#define MLXINFER_ROLL _Pragma("GCC unroll 1")
#endif
#define MLXINFER_INLINE [[gnu::always_inline]] inline

namespace mlxinfer::cpu::MLXINFER_ISA {

constexpr int kWidth = MLXINFER_WIDTH; // 32-bit lanes

typedef float F32 __attribute__((vector_size(4 * MLXINFER_WIDTH)));
typedef int32_t I32 __attribute__((vector_size(4 * MLXINFER_WIDTH)));
typedef uint32_t U32 __attribute__((vector_size(4 * MLXINFER_WIDTH)));
typedef uint16_t U16 __attribute__((vector_size(2 * MLXINFER_WIDTH))); // as many lanes, 16 bits each

// 16-bit floats in memory.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

template <typename V>
MLXINFER_INLINE V load_bits(const void* p) {
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}
template <typename V>
MLXINFER_INLINE void store_bits(void* p, V v) {
  memcpy(p, &v, sizeof(V));
}

// Asks for the cache lines of `bytes` bytes; any address will do.
template <int64_t bytes>
MLXINFER_INLINE void prefetch(const uint8_t* p) {
  MLXINFER_UNROLL
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(p + i);
  }
}

MLXINFER_INLINE F32 broadcast(float x) {
  return x - F32{};
}
MLXINFER_INLINE I32 broadcast(int32_t x) {
  return x - I32{};
}
MLXINFER_INLINE U32 broadcast(uint32_t x) {
  return x - U32{};
}

// a * b + c, rounded once where the machine has that. Spelt out where results must not depend on what a compiler contracts.
MLXINFER_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512VNNI__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

MLXINFER_INLINE F32 to_float(I32 v) {
  return __builtin_convertvector(v, F32);
}

MLXINFER_INLINE F32 max(F32 a, F32 b) {
  return a > b ? a : b;
}
MLXINFER_INLINE F32 min(F32 a, F32 b) {
  return a < b ? a : b;
}
MLXINFER_INLINE F32 abs(F32 v) {
  return (F32)((U32)v & 0x7fffffffu);
}

} // namespace mlxinfer::cpu::MLXINFER_ISA
