// Metal's words in C++ for OpenCL: its address spaces exist there under other names, and are checked as Metal checks them.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_non_portable_kernel_param_types : enable  // atomic<T>*

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f

// A lane or thread as the runtime knows it; the same struct is in runtime/device.h.
struct __emu_thread {
  uint position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint grid[3], threads[3], dispatched[3], threadgroups[3];
  uint lane, simdgroup, simdgroups, dispatched_simdgroups, index;
  const thread size_t* arguments;
};

extern "C" {
const thread __emu_thread* __emu_self();
uint __emu_lane();
thread void* __emu_slots();  // 32 of them for the simdgroup's next operation
void __emu_meet(uint kind, uint bytes, const constant char* file, int line);
void __emu_barrier(uint whole_threadgroup, uint flags, const constant char* file, int line);
}

// Where the user's code calls: last parameters of all that wait for other threads.
#define EMU_PLACE const constant char *file = __builtin_FILE(), int line = __builtin_LINE()

// Exchanges between lanes are no accesses to memory, which is what races are about.
#if EMU_TSAN
#define EMU_UNTRACED __attribute__((no_sanitize("thread")))
#else
#define EMU_UNTRACED
#endif

namespace metal {

template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, typename X, typename Y>
struct conditional {
  typedef X type;
};
template <typename X, typename Y>
struct conditional<false, X, Y> {
  typedef Y type;
};
template <bool B, typename X, typename Y>
using conditional_t = typename conditional<B, X, Y>::type;

template <typename A, typename B>
struct is_same {
  static constexpr constant bool value = false;
};
template <typename A>
struct is_same<A, A> {
  static constexpr constant bool value = true;
};
template <typename A, typename B>
constexpr constant bool is_same_v = is_same<A, B>::value;

template <typename T>
constexpr constant bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;

template <typename T>
struct numeric_limits;

#define EMU_LIMITS(T, LOWEST, MIN, MAX, INF)                \
  template <>                                               \
  struct numeric_limits<T> {                                \
    static constexpr T lowest() { return T(LOWEST); }       \
    static constexpr T min() { return T(MIN); }             \
    static constexpr T max() { return T(MAX); }             \
    static constexpr T infinity() { return T(INF); }        \
  };
EMU_LIMITS(float, -__FLT_MAX__, __FLT_MIN__, __FLT_MAX__, __builtin_inff())
EMU_LIMITS(half, -65504.0f, 6.103515625e-5f, 65504.0f, __builtin_inff())
EMU_LIMITS(bfloat, -3.3895314e38f, 1.17549435e-38f, 3.3895314e38f, __builtin_inff())
EMU_LIMITS(char, -128, -128, 127, 0)
EMU_LIMITS(uchar, 0, 0, 255, 0)
EMU_LIMITS(short, -32768, -32768, 32767, 0)
EMU_LIMITS(ushort, 0, 0, 65535, 0)
EMU_LIMITS(int, -2147483647 - 1, -2147483647 - 1, 2147483647, 0)
EMU_LIMITS(uint, 0, 0, 4294967295u, 0)
EMU_LIMITS(long, -9223372036854775807l - 1, -9223372036854775807l - 1, 9223372036854775807l, 0)
EMU_LIMITS(ulong, 0, 0, 18446744073709551615ul, 0)
#undef EMU_LIMITS

template <typename To, typename From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  return __builtin_astype(x, To);
}

}  // namespace metal
