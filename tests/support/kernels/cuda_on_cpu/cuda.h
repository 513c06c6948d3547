// As much of CUDA as translated kernels use, for a compiler of C++ on a CPU. No standard header is included: the kernels' own frame
// declares fixed-width integers as CUDA has them.
#pragma once

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define memcpy __builtin_memcpy

typedef decltype(sizeof(0)) size_t;
typedef _Float16 __half;
typedef __bf16 __nv_bfloat16;

struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
float expf(float), exp2f(float), logf(float), log2f(float), sinf(float), cosf(float), tanhf(float), sqrtf(float), floorf(float);
float ceilf(float), rintf(float), roundf(float), truncf(float), fabsf(float), powf(float, float), fmaf(float, float, float);
float fmaxf(float, float), fminf(float, float);
void cuda_meet_block(int line);
// What lane `from` of the warp has passed; every lane has to come.
void cuda_exchange(const void* mine, void* result, unsigned size, unsigned from);
unsigned cuda_lane();
}
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __popc(int x) { return __builtin_popcount(unsigned(x)); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

inline void __syncthreads(int line = __builtin_LINE()) { cuda_meet_block(line); }
template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  T result;
  cuda_exchange(&x, &result, sizeof(T), unsigned(from) & 31u);
  return result;
}
inline void __syncwarp() { __shfl_sync(~0u, 0, 0); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes) { return __shfl_sync(mask, x, int(cuda_lane() ^ unsigned(lanes))); }
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta) {
  return __shfl_sync(mask, x, int(cuda_lane() + delta < 32 ? cuda_lane() + delta : cuda_lane()));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta) { return __shfl_sync(mask, x, int(cuda_lane() >= delta ? cuda_lane() - delta : cuda_lane())); }
inline bool __any_sync(unsigned mask, bool x) {
  bool any = false;
  for (int i = 0; i < 32; i++) any |= __shfl_sync(mask, x, i);
  return any;
}
inline bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }
