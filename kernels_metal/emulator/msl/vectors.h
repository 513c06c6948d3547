// Vector types with their swizzles come from the compiler; their constructors, which OpenCL does not have, are function-like macros.
#pragma once

#define EMU_VECTORS(T)                                        \
  typedef T T##2 __attribute__((ext_vector_type(2)));         \
  typedef T T##3 __attribute__((ext_vector_type(3)));         \
  typedef T T##4 __attribute__((ext_vector_type(4)));
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(float)
#undef EMU_VECTORS

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename T>
struct __shape_of {
  typedef T element;
  static constexpr constant int size = 1;
};
template <typename T, int N>
struct __shape_of<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr constant int size = N;
};

template <typename E, typename A>
inline void __put(thread E* to, thread int& at, A a) {
  if constexpr (__shape_of<A>::size == 1)
    to[at++] = E(a);
  else
    for (int i = 0; i < __shape_of<A>::size; i++) to[at++] = E(a[i]);
}

template <typename V, typename... A>
inline V __make(A... a) {
  typedef typename __shape_of<V>::element E;
  constexpr int size = __shape_of<V>::size;
  constexpr int given = (0 + ... + __shape_of<A>::size);
  static_assert(given == size || (sizeof...(A) == 1 && given == 1), "wrong number of components in a vector's constructor");
  if constexpr (sizeof...(A) == size && given == size) {
    return V{E(a)...};
  } else {
    E all[size];
    int at = 0;
    (__put<E>(all, at, a), ...);
    V v;
    for (int i = 0; i < size; i++) v[i] = all[given == 1 ? 0 : i];
    return v;
  }
}

#define EMU_MAKE(T)                                                           \
  template <typename... A> inline T##2 __make_##T##2(A... a) { return __make<T##2>(a...); } \
  template <typename... A> inline T##3 __make_##T##3(A... a) { return __make<T##3>(a...); } \
  template <typename... A> inline T##4 __make_##T##4(A... a) { return __make<T##4>(a...); }
EMU_MAKE(char)
EMU_MAKE(uchar)
EMU_MAKE(short)
EMU_MAKE(ushort)
EMU_MAKE(int)
EMU_MAKE(uint)
EMU_MAKE(long)
EMU_MAKE(ulong)
EMU_MAKE(half)
EMU_MAKE(bfloat)
EMU_MAKE(float)
#undef EMU_MAKE

}  // namespace metal
