// The part of the Metal Shading Language that kernels here use, in CUDA. A simdgroup is a warp, a threadgroup a block.
// Kernels reach it through `translate.py`; nothing here allocates or synchronises more than its Metal namesake.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define MSL __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#endif
#define M_LOG2E_F 1.44269504088896340736f
#define M_PI_F 3.14159265358979323846f

namespace metal {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;
typedef __half half;
typedef __nv_bfloat16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long long int64_t;
typedef ulong uint64_t;

constexpr unsigned ALL_LANES = 0xffffffffu;

MSL uint linear_thread_index() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
MSL uint lane_index() { return linear_thread_index() & 31u; }

// ---- vectors: members, indexing, arithmetic by component; no swizzles ----
template <typename T, int N>
struct vec;

#define MSL_INDEXING                                      \
  MSL T& operator[](int i) { return (&x)[i]; }            \
  MSL const T& operator[](int i) const { return (&x)[i]; } \
  vec() = default;

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  MSL_INDEXING
  MSL explicit vec(T a) : x(a), y(a) {}
  MSL vec(T a, T b) : x(a), y(b) {}
  template <typename U>
  MSL explicit vec(vec<U, 2> o) : x(T(o.x)), y(T(o.y)) {}
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  MSL_INDEXING
  MSL explicit vec(T a) : x(a), y(a), z(a) {}
  MSL vec(T a, T b, T c) : x(a), y(b), z(c) {}
  template <typename U>
  MSL explicit vec(vec<U, 3> o) : x(T(o.x)), y(T(o.y)), z(T(o.z)) {}
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  MSL_INDEXING
  MSL explicit vec(T a) : x(a), y(a), z(a), w(a) {}
  MSL vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  MSL vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  template <typename U>
  MSL explicit vec(vec<U, 4> o) : x(T(o.x)), y(T(o.y)), z(T(o.z)), w(T(o.w)) {}
};

#define MSL_VECTOR_OPERATOR(op)                                       \
  template <typename T, int N>                                        \
  MSL vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {               \
    for (int i = 0; i < N; ++i) a[i] = a[i] op b[i];                  \
    return a;                                                         \
  }                                                                   \
  template <typename T, int N>                                        \
  MSL vec<T, N> operator op(vec<T, N> a, T b) { return a op vec<T, N>(b); } \
  template <typename T, int N>                                        \
  MSL vec<T, N> operator op(T a, vec<T, N> b) { return vec<T, N>(a) op b; } \
  template <typename T, int N>                                        \
  MSL vec<T, N>& operator op##=(vec<T, N>& a, vec<T, N> b) { return a = a op b; } \
  template <typename T, int N>                                        \
  MSL vec<T, N>& operator op##=(vec<T, N>& a, T b) { return a = a op vec<T, N>(b); }
MSL_VECTOR_OPERATOR(+)
MSL_VECTOR_OPERATOR(-)
MSL_VECTOR_OPERATOR(*)
MSL_VECTOR_OPERATOR(/)
MSL_VECTOR_OPERATOR(&)
MSL_VECTOR_OPERATOR(|)
MSL_VECTOR_OPERATOR(>>)
MSL_VECTOR_OPERATOR(<<)

#define MSL_VECTOR_NAMES(T) typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4;
MSL_VECTOR_NAMES(char)
MSL_VECTOR_NAMES(uchar)
MSL_VECTOR_NAMES(short)
MSL_VECTOR_NAMES(ushort)
MSL_VECTOR_NAMES(int)
MSL_VECTOR_NAMES(uint)
MSL_VECTOR_NAMES(long)
MSL_VECTOR_NAMES(ulong)
MSL_VECTOR_NAMES(float)
MSL_VECTOR_NAMES(half)
MSL_VECTOR_NAMES(bfloat)

// ---- scalars ----
template <typename To, typename From>
MSL To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the sizes differ");
  To result;
  memcpy(&result, &x, sizeof(To));
  return result;
}

// The precise functions of both languages are the ones without a namespace: neither is compiled with fast mathematics.
#define MSL_MATHS                                              \
  MSL float exp(float x) { return ::expf(x); }                 \
  MSL float exp2(float x) { return ::exp2f(x); }               \
  MSL float log(float x) { return ::logf(x); }                 \
  MSL float log2(float x) { return ::log2f(x); }               \
  MSL float sin(float x) { return ::sinf(x); }                 \
  MSL float cos(float x) { return ::cosf(x); }                 \
  MSL float tanh(float x) { return ::tanhf(x); }               \
  MSL float sqrt(float x) { return ::sqrtf(x); }               \
  MSL float rsqrt(float x) { return 1.0f / ::sqrtf(x); }       \
  MSL float floor(float x) { return ::floorf(x); }             \
  MSL float ceil(float x) { return ::ceilf(x); }               \
  MSL float rint(float x) { return ::rintf(x); }               \
  MSL float round(float x) { return ::roundf(x); }             \
  MSL float trunc(float x) { return ::truncf(x); }             \
  MSL float fabs(float x) { return ::fabsf(x); }               \
  MSL float pow(float x, float y) { return ::powf(x, y); }
MSL_MATHS
namespace precise { MSL_MATHS }
namespace fast {
MSL float exp(float x) { return ::__expf(x); }
MSL float exp2(float x) { return ::exp2f(x); }
MSL float log(float x) { return ::__logf(x); }
MSL float log2(float x) { return ::__log2f(x); }
MSL float tanh(float x) { return ::tanhf(x); }
MSL float sqrt(float x) { return ::sqrtf(x); }
MSL float rsqrt(float x) { return ::rsqrtf(x); }
}  // namespace fast

MSL float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
MSL bool isnan(float x) { return x != x; }
MSL bool isinf(float x) { return ::fabsf(x) == __int_as_float(0x7f800000); }
MSL bool isfinite(float x) { return !(isnan(x) || isinf(x)); }
template <typename T>
MSL T max(T a, T b) { return a < b ? b : a; }
template <typename T>
MSL T min(T a, T b) { return b < a ? b : a; }
MSL float max(float a, float b) { return ::fmaxf(a, b); }
MSL float min(float a, float b) { return ::fminf(a, b); }
template <typename T>
MSL T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T>
MSL T abs(T x) { return x < T(0) ? -x : x; }
template <typename T>
MSL T select(T no, T yes, bool choice) { return choice ? yes : no; }
MSL uint popcount(uint x) { return uint(__popc(int(x))); }
MSL uint clz(uint x) { return uint(__clz(int(x))); }
MSL uint ctz(uint x) { return x ? uint(__ffs(int(x))) - 1u : 32u; }
MSL uint extract_bits(uint x, uint offset, uint bits) { return bits >= 32u ? x >> offset : (x >> offset) & ((1u << bits) - 1u); }
template <typename T, int N>
MSL T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr MSL float max() { return FLT_MAX; }
  static constexpr MSL float lowest() { return -FLT_MAX; }
  static MSL float infinity() { return __int_as_float(0x7f800000); }
};

// ---- threads together ----
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
MSL constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
MSL void threadgroup_barrier(mem_flags) { __syncthreads(); }
MSL void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <typename T>
MSL T simd_shuffle(T x, uint lane) { return __shfl_sync(ALL_LANES, x, lane); }
template <typename T>
MSL T simd_broadcast(T x, uint lane) { return __shfl_sync(ALL_LANES, x, lane); }
template <typename T>
MSL T simd_broadcast_first(T x) { return __shfl_sync(ALL_LANES, x, 0); }
template <typename T>
MSL T simd_shuffle_xor(T x, uint mask) { return __shfl_xor_sync(ALL_LANES, x, mask); }
template <typename T>
MSL T simd_shuffle_down(T x, uint delta) { return __shfl_down_sync(ALL_LANES, x, delta); }
template <typename T>
MSL T simd_shuffle_up(T x, uint delta) { return __shfl_up_sync(ALL_LANES, x, delta); }

#define MSL_REDUCTION(name, combined)                      \
  template <typename T>                                    \
  MSL T name(T a) {                                        \
    for (uint mask = 16; mask; mask >>= 1) {               \
      const T b = simd_shuffle_xor(a, mask);               \
      a = combined;                                        \
    }                                                      \
    return a;                                              \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_and, a& b)
MSL_REDUCTION(simd_xor, a ^ b)
MSL bool simd_any(bool x) { return __any_sync(ALL_LANES, x); }
MSL bool simd_all(bool x) { return __all_sync(ALL_LANES, x); }

template <typename T>
MSL T simd_prefix_inclusive_sum(T x) {
  for (uint delta = 1; delta < 32; delta <<= 1) {
    const T below = simd_shuffle_up(x, delta);
    if (lane_index() >= delta) x += below;
  }
  return x;
}
template <typename T>
MSL T simd_prefix_exclusive_sum(T x) { return simd_prefix_inclusive_sum(x) - x; }

// ---- simdgroup_matrix: 8x8 over a warp, two neighbours of a row in each lane, where Apple GPUs have them ----
MSL uint matrix_row(uint lane) { return ((lane >> 4) << 2) | ((lane >> 1) & 3u); }
MSL uint matrix_column(uint lane) { return ((lane >> 3) & 1u) * 4u + (lane & 1u) * 2u; }

template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix: 8x8 is the only size");
  vec<T, 2> elements;
  MSL vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Columns, int Rows>
MSL simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = vec<T, 2>(value, value);
  return m;
}

// The place of this lane's first element, and the distance to its second.
MSL ulong matrix_offset(ulong stride, ulong2 origin, bool transposed, ulong& next) {
  const ulong row = matrix_row(lane_index()), column = matrix_column(lane_index());
  next = transposed ? stride : 1;
  return origin.y * stride + origin.x + (transposed ? column * stride + row : row * stride + column);
}

template <typename T>
MSL void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* source, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false) {
  ulong next;
  const ulong first = matrix_offset(stride, origin, transposed, next);
  m.elements = vec<T, 2>(source[first], source[first + next]);
}

template <typename T>
MSL void simdgroup_store(simdgroup_matrix<T, 8, 8> m, T* target, ulong stride = 8, ulong2 origin = ulong2(0), bool transposed = false) {
  ulong next;
  const ulong first = matrix_offset(stride, origin, transposed, next);
  target[first] = m.elements.x;
  target[first + next] = m.elements.y;
}

// Both elements of another lane, in one shuffle where they fit a register.
MSL vec<float, 2> shuffle_pair(vec<float, 2> pair, uint lane) {
  return vec<float, 2>(simd_shuffle(pair.x, lane), simd_shuffle(pair.y, lane));
}
template <typename T>
MSL vec<float, 2> shuffle_pair(vec<T, 2> pair, uint lane) {
  const vec<T, 2> other = as_type<vec<T, 2>>(simd_shuffle(as_type<uint>(pair), lane));
  return vec<float, 2>(float(other.x), float(other.y));
}

// d = a b + c. Each lane fetches its row of a and its two columns of b, two products at a time; sums are in float.
template <typename D, typename A, typename B, typename C>
MSL void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  const uint my_row = lane_index() & 22u, my_columns = lane_index() & 9u;
  float first = float(c.elements.x), second = float(c.elements.y);
#pragma unroll
  for (uint k = 0; k < 8; k += 2) {
    const vec<float, 2> left = shuffle_pair(a.elements, my_row | ((k >> 2) << 3) | ((k >> 1) & 1u));
    const vec<float, 2> top = shuffle_pair(b.elements, my_columns | ((k >> 2) << 4) | ((k & 3u) << 1));
    const vec<float, 2> bottom = shuffle_pair(b.elements, my_columns | ((k >> 2) << 4) | (((k + 1u) & 3u) << 1));
    first += left.x * top.x + left.y * bottom.x;
    second += left.x * top.y + left.y * bottom.y;
  }
  d.elements = vec<D, 2>(D(first), D(second));
}

template <typename T>
MSL void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<T, 8, 8>(T(0)));
}

}  // namespace metal
