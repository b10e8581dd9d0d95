// <metal_integer> and the integer overloads of <metal_common>.
#pragma once
#include "math.h"

namespace metal {
#define __MTL_INTEGER_COMMON(T)                                                                  \
  __MTL_INLINE constexpr T min(T x, T y) { return y < x ? y : x; }                               \
  __MTL_INLINE constexpr T max(T x, T y) { return x < y ? y : x; }                               \
  __MTL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }          \
  __MTL_INLINE constexpr T min3(T x, T y, T z) { return min(x, min(y, z)); }                     \
  __MTL_INLINE constexpr T max3(T x, T y, T z) { return max(x, max(y, z)); }                     \
  __MTL_INLINE constexpr T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }  \
  __MTL_MAP2(min, T) __MTL_MAP2(max, T) __MTL_MAP3(clamp, T)                                     \
  template <int N> __MTL_INLINE vec<T, N> min(vec<T, N> a, T b) { return min(a, (vec<T, N>)b); } \
  template <int N> __MTL_INLINE vec<T, N> max(vec<T, N> a, T b) { return max(a, (vec<T, N>)b); } \
  template <int N> __MTL_INLINE vec<T, N> clamp(vec<T, N> a, T low, T high) {                    \
    return clamp(a, (vec<T, N>)low, (vec<T, N>)high);                                            \
  }
__MTL_INTEGER_TYPES(__MTL_INTEGER_COMMON)
#undef __MTL_INTEGER_COMMON

#define __MTL_ABS(T) __MTL_INLINE constexpr T abs(T x) { return x < 0 ? (T)-x : x; } __MTL_MAP1(abs, T)
__MTL_SIGNED_TYPES(__MTL_ABS)
#undef __MTL_ABS

#define __MTL_BITS(T)                                                                                           \
  __MTL_INLINE constexpr T popcount(T x) { return (T)__builtin_popcountll((make_unsigned_t<T>)x); }             \
  __MTL_INLINE constexpr T clz(T x) {                                                                           \
    return x ? (T)(__builtin_clzll((make_unsigned_t<T>)x) - (64 - 8 * (int)sizeof(T))) : (T)(8 * sizeof(T));    \
  }                                                                                                             \
  __MTL_INLINE constexpr T ctz(T x) {                                                                           \
    return x ? (T)__builtin_ctzll((make_unsigned_t<T>)x) : (T)(8 * sizeof(T));                                  \
  }                                                                                                             \
  __MTL_INLINE constexpr T rotate(T x, T by) {                                                                  \
    typedef make_unsigned_t<T> U;                                                                               \
    int s = (int)(by & (8 * sizeof(T) - 1));                                                                    \
    return s ? (T)((U)((U)x << s) | ((U)x >> (8 * sizeof(T) - s))) : x;                                         \
  }                                                                                                             \
  __MTL_INLINE constexpr make_unsigned_t<T> absdiff(T x, T y) {                                                 \
    typedef make_unsigned_t<T> U;                                                                               \
    return x > y ? (U)x - (U)y : (U)y - (U)x;                                                                   \
  }                                                                                                             \
  __MTL_INLINE constexpr T extract_bits(T x, uint offset, uint bits) {                                          \
    int width = 8 * sizeof(T);                                                                                  \
    return bits ? (T)((T)((make_unsigned_t<T>)x << (width - bits - offset)) >> (width - bits)) : (T)0;          \
  }                                                                                                             \
  __MTL_INLINE constexpr T reverse_bits(T x) {                                                                  \
    typedef make_unsigned_t<T> U;                                                                               \
    U r = 0, rest = (U)x;                                                                                       \
    for (unsigned i = 0; i < 8 * sizeof(T); ++i, rest = (U)(rest >> 1)) r = (U)((r << 1) | (rest & 1));         \
    return (T)r;                                                                                                \
  }
__MTL_INTEGER_TYPES(__MTL_BITS)
#undef __MTL_BITS

__MTL_INLINE constexpr int mulhi(int x, int y) { return (int)(((long)x * (long)y) >> 32); }
__MTL_INLINE constexpr uint mulhi(uint x, uint y) { return (uint)(((ulong)x * (ulong)y) >> 32); }
__MTL_INLINE constexpr int mul24(int x, int y) { return x * y; }
__MTL_INLINE constexpr uint mul24(uint x, uint y) { return x * y; }
__MTL_INLINE constexpr int mad24(int x, int y, int z) { return x * y + z; }
__MTL_INLINE constexpr uint mad24(uint x, uint y, uint z) { return x * y + z; }
}  // namespace metal
