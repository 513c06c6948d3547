// Functions of Metal's <metal_math>, <metal_common>, <metal_relational>. float is computed by the C library: more exact than a GPU's.
#pragma once

extern "C" {
float expf(float);
float exp2f(float);
float exp10f(float);
float logf(float);
float log2f(float);
float log10f(float);
float sinf(float);
float cosf(float);
float tanf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float powf(float, float);
float atan2f(float, float);
float fmodf(float, float);
}

namespace metal {

// The C library carries no trace of uninitialised memory: without this, MSan would take exp(garbage) for good.
#if EMU_MSAN
extern "C" int __emu_zero();
extern "C" uint __msan_get_origin(const volatile thread void*);
// The name of this variable is what reports call threadgroup memory that nobody has written.
extern "C" __attribute__((visibility("default"))) uint __emu_origin() {
  volatile int threadgroup_memory;
  return __msan_get_origin(&threadgroup_memory);
}
inline float __keep_trace(float result, float x) {
  return __builtin_astype(__builtin_astype(result, int) + __builtin_astype(x, int) * __emu_zero(), float);
}
#else
inline float __keep_trace(float result, float) { return result; }
#endif

inline float __reciprocal_root(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float __fraction(float x) { return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f); }
inline float __sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f; }
inline float __saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }

#define EMU_UNARY(NAME, F)                                                                        \
  inline float NAME(float x) { return __keep_trace(F(x), x); }                                   \
  inline half NAME(half x) { return half(NAME(float(x))); }                                       \
  inline bfloat NAME(bfloat x) { return bfloat(NAME(float(x))); }                                 \
  template <typename T, int N>                                                                    \
  inline vec<T, N> NAME(vec<T, N> v) {                                                            \
    vec<T, N> r;                                                                                  \
    for (int i = 0; i < N; i++) r[i] = T(NAME(float(v[i])));                                      \
    return r;                                                                                     \
  }
#define EMU_BINARY(NAME, F)                                                                       \
  inline float NAME(float x, float y) { return __keep_trace(__keep_trace(F(x, y), x), y); }       \
  inline half NAME(half x, half y) { return half(NAME(float(x), float(y))); }                     \
  inline bfloat NAME(bfloat x, bfloat y) { return bfloat(NAME(float(x), float(y))); }             \
  template <typename T, int N>                                                                    \
  inline vec<T, N> NAME(vec<T, N> v, vec<T, N> w) {                                               \
    vec<T, N> r;                                                                                  \
    for (int i = 0; i < N; i++) r[i] = T(NAME(float(v[i]), float(w[i])));                         \
    return r;                                                                                     \
  }
// What exists in metal::, metal::fast:: and metal::precise::.
#define EMU_MATH                                                                                  \
  EMU_UNARY(exp, expf) EMU_UNARY(exp2, exp2f) EMU_UNARY(exp10, exp10f)                            \
  EMU_UNARY(log, logf) EMU_UNARY(log2, log2f) EMU_UNARY(log10, log10f)                            \
  EMU_UNARY(sin, sinf) EMU_UNARY(cos, cosf) EMU_UNARY(tan, tanf)                                  \
  EMU_UNARY(asin, asinf) EMU_UNARY(acos, acosf) EMU_UNARY(atan, atanf)                            \
  EMU_UNARY(sinh, sinhf) EMU_UNARY(cosh, coshf) EMU_UNARY(tanh, tanhf)                            \
  EMU_UNARY(asinh, asinhf) EMU_UNARY(acosh, acoshf) EMU_UNARY(atanh, atanhf)                      \
  EMU_UNARY(sqrt, __builtin_sqrtf) EMU_UNARY(rsqrt, __reciprocal_root)                            \
  EMU_UNARY(floor, __builtin_floorf) EMU_UNARY(ceil, __builtin_ceilf) EMU_UNARY(trunc, __builtin_truncf) \
  EMU_UNARY(rint, __builtin_rintf) EMU_UNARY(round, __builtin_roundf) EMU_UNARY(fabs, __builtin_fabsf)   \
  EMU_UNARY(fract, __fraction) EMU_UNARY(sign, __sign) EMU_UNARY(saturate, __saturate)            \
  EMU_BINARY(pow, powf) EMU_BINARY(powr, powf) EMU_BINARY(atan2, atan2f) EMU_BINARY(fmod, fmodf)  \
  EMU_BINARY(fmax, __builtin_fmaxf) EMU_BINARY(fmin, __builtin_fminf) EMU_BINARY(copysign, __builtin_copysignf)
EMU_MATH
namespace fast {
EMU_MATH
}
namespace precise {
EMU_MATH
}
#undef EMU_MATH
#undef EMU_UNARY
#undef EMU_BINARY

inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline half fma(half x, half y, half z) { return half(__builtin_fmaf(float(x), float(y), float(z))); }
inline bfloat fma(bfloat x, bfloat y, bfloat z) { return bfloat(__builtin_fmaf(float(x), float(y), float(z))); }
inline float mad(float x, float y, float z) { return fma(x, y, z); }
inline float ldexp(float x, int n) { return __builtin_ldexpf(x, n); }

// As fmax and fmin for floating point: of a NaN and a number, the number.
template <typename T>
inline T max(T a, T b) {
  if constexpr (__shape_of<T>::size > 1) {
    T r;
    for (int i = 0; i < __shape_of<T>::size; i++) r[i] = max(a[i], b[i]);
    return r;
  } else {
    return a < b || a != a ? b : a;
  }
}
template <typename T>
inline T min(T a, T b) {
  if constexpr (__shape_of<T>::size > 1) {
    T r;
    for (int i = 0; i < __shape_of<T>::size; i++) r[i] = min(a[i], b[i]);
    return r;
  } else {
    return b < a || a != a ? b : a;
  }
}
template <typename T>
inline T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <typename T>
inline T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <typename T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T, int N>
inline vec<T, N> clamp(vec<T, N> x, T low, T high) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = clamp(x[i], low, high);
  return r;
}
template <typename T>
inline T abs(T x) {
  if constexpr (__shape_of<T>::size > 1) {
    T r;
    for (int i = 0; i < __shape_of<T>::size; i++) r[i] = abs(x[i]);
    return r;
  } else if constexpr (is_floating_point_v<T>) {
    return T(__builtin_fabsf(float(x)));
  } else {
    return x < T(0) ? T(-x) : x;
  }
}
template <typename T>
inline T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
template <typename T>
inline T step(T edge, T x) {
  return x < edge ? T(0) : T(1);
}
template <typename T>
inline T select(T a, T b, bool chosen) {
  return chosen ? b : a;
}
// A comparison of vectors gives here integers of the same width that are 0 or -1.
template <typename T, int N, typename M>
inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<M, N> chosen) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = chosen[i] ? b[i] : a[i];
  return r;
}
template <typename M, int N>
inline bool any(vec<M, N> x) {
  for (int i = 0; i < N; i++)
    if (x[i]) return true;
  return false;
}
template <typename M, int N>
inline bool all(vec<M, N> x) {
  for (int i = 0; i < N; i++)
    if (!x[i]) return false;
  return true;
}
template <typename T>
inline bool isnan(T x) {
  return x != x;
}
template <typename T>
inline bool isinf(T x) {
  return __builtin_fabsf(float(x)) == __builtin_inff();
}
template <typename T>
inline bool isfinite(T x) {
  return __builtin_fabsf(float(x)) < __builtin_inff();
}
template <typename T>
inline bool signbit(T x) {
  return __builtin_astype(float(x), int) < 0;
}

template <typename T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <typename T, int N>
inline T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <typename T, int N>
inline T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <typename T, int N>
inline vec<T, N> normalize(vec<T, N> a) {
  return a * rsqrt(dot(a, a));
}

}  // namespace metal
