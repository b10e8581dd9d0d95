// Vector types and their constructors.
#pragma once
#include "keywords.h"

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}

#define __MTL_VECTOR_TYPE(name, T)                            \
  typedef T name##2 __attribute__((ext_vector_type(2)));      \
  typedef T name##3 __attribute__((ext_vector_type(3)));      \
  typedef T name##4 __attribute__((ext_vector_type(4)));
__MTL_VECTOR_TYPE(bool, bool)
__MTL_VECTOR_TYPE(char, signed char)
__MTL_VECTOR_TYPE(uchar, uchar)
__MTL_VECTOR_TYPE(short, short)
__MTL_VECTOR_TYPE(ushort, ushort)
__MTL_VECTOR_TYPE(int, int)
__MTL_VECTOR_TYPE(uint, uint)
__MTL_VECTOR_TYPE(long, long)
__MTL_VECTOR_TYPE(ulong, ulong)
__MTL_VECTOR_TYPE(half, _Float16)
__MTL_VECTOR_TYPE(bfloat, __bf16)
__MTL_VECTOR_TYPE(float, float)

#define __MTL_PACKED_TYPE(name, T, bytes)                                              \
  typedef T packed_##name##2 __attribute__((ext_vector_type(2), aligned(bytes)));      \
  typedef T packed_##name##4 __attribute__((ext_vector_type(4), aligned(bytes)));
__MTL_PACKED_TYPE(float, float, 4)
__MTL_PACKED_TYPE(half, _Float16, 2)
__MTL_PACKED_TYPE(bfloat, __bf16, 2)
__MTL_PACKED_TYPE(uint, uint, 4)

namespace __mtl {
// number of components, 0 for a scalar
template <class A> struct components { static constexpr int n = 0; };
template <class S> struct components<S __attribute__((ext_vector_type(2)))> { static constexpr int n = 2; };
template <class S> struct components<S __attribute__((ext_vector_type(3)))> { static constexpr int n = 3; };
template <class S> struct components<S __attribute__((ext_vector_type(4)))> { static constexpr int n = 4; };

template <class T> constexpr void put(T *) {}
template <class T, class A, class... Rest> __MTL_INLINE constexpr void put(T *out, A a, Rest... rest) {
  constexpr int n = components<A>::n;
  if constexpr (n == 0)
    *out++ = (T)a;
  else
    for (int i = 0; i < n; ++i) *out++ = (T)a[i];
  put(out, rest...);
}
template <class... A> struct total { static constexpr int n = 0; };
template <class A, class... Rest> struct total<A, Rest...> {
  static constexpr int n = (components<A>::n ? components<A>::n : 1) + total<Rest...>::n;
};
}  // namespace __mtl

// vec<T, N>(...) and float4(...): no argument, one scalar for all components, or parts that add up to N components
template <class T, int N, class... A> __MTL_INLINE constexpr metal::vec<T, N> __mtl_make_vec(A... a) {
  metal::vec<T, N> r{};
  if constexpr (sizeof...(A) == 1 && __mtl::total<A...>::n == 1 && (__mtl::components<A>::n + ... + 0) == 0) {
    for (int i = 0; i < N; ++i) r[i] = (T)(a, ...);
  } else if constexpr (sizeof...(A) > 0) {
    static_assert(__mtl::total<A...>::n == N, "vector constructor: wrong number of components");
    T parts[N] = {};
    __mtl::put(parts, a...);
    for (int i = 0; i < N; ++i) r[i] = parts[i];
  }
  return r;
}

#define bool2(...) __mtl_make_vec<bool, 2>(__VA_ARGS__)
#define bool3(...) __mtl_make_vec<bool, 3>(__VA_ARGS__)
#define bool4(...) __mtl_make_vec<bool, 4>(__VA_ARGS__)
#define char2(...) __mtl_make_vec<signed char, 2>(__VA_ARGS__)
#define char3(...) __mtl_make_vec<signed char, 3>(__VA_ARGS__)
#define char4(...) __mtl_make_vec<signed char, 4>(__VA_ARGS__)
#define uchar2(...) __mtl_make_vec<uchar, 2>(__VA_ARGS__)
#define uchar3(...) __mtl_make_vec<uchar, 3>(__VA_ARGS__)
#define uchar4(...) __mtl_make_vec<uchar, 4>(__VA_ARGS__)
#define short2(...) __mtl_make_vec<short, 2>(__VA_ARGS__)
#define short3(...) __mtl_make_vec<short, 3>(__VA_ARGS__)
#define short4(...) __mtl_make_vec<short, 4>(__VA_ARGS__)
#define ushort2(...) __mtl_make_vec<ushort, 2>(__VA_ARGS__)
#define ushort3(...) __mtl_make_vec<ushort, 3>(__VA_ARGS__)
#define ushort4(...) __mtl_make_vec<ushort, 4>(__VA_ARGS__)
#define int2(...) __mtl_make_vec<int, 2>(__VA_ARGS__)
#define int3(...) __mtl_make_vec<int, 3>(__VA_ARGS__)
#define int4(...) __mtl_make_vec<int, 4>(__VA_ARGS__)
#define uint2(...) __mtl_make_vec<uint, 2>(__VA_ARGS__)
#define uint3(...) __mtl_make_vec<uint, 3>(__VA_ARGS__)
#define uint4(...) __mtl_make_vec<uint, 4>(__VA_ARGS__)
#define long2(...) __mtl_make_vec<long, 2>(__VA_ARGS__)
#define long3(...) __mtl_make_vec<long, 3>(__VA_ARGS__)
#define long4(...) __mtl_make_vec<long, 4>(__VA_ARGS__)
#define ulong2(...) __mtl_make_vec<ulong, 2>(__VA_ARGS__)
#define ulong3(...) __mtl_make_vec<ulong, 3>(__VA_ARGS__)
#define ulong4(...) __mtl_make_vec<ulong, 4>(__VA_ARGS__)
#define half2(...) __mtl_make_vec<half, 2>(__VA_ARGS__)
#define half3(...) __mtl_make_vec<half, 3>(__VA_ARGS__)
#define half4(...) __mtl_make_vec<half, 4>(__VA_ARGS__)
#define bfloat2(...) __mtl_make_vec<bfloat, 2>(__VA_ARGS__)
#define bfloat3(...) __mtl_make_vec<bfloat, 3>(__VA_ARGS__)
#define bfloat4(...) __mtl_make_vec<bfloat, 4>(__VA_ARGS__)
#define float2(...) __mtl_make_vec<float, 2>(__VA_ARGS__)
#define float3(...) __mtl_make_vec<float, 3>(__VA_ARGS__)
#define float4(...) __mtl_make_vec<float, 4>(__VA_ARGS__)
