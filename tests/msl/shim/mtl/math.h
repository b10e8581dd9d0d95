// <metal_math>, <metal_common>, <metal_geometric>, <metal_relational> for float and half.
// The CPU's libm computes everything in float, for fast:: and precise:: alike; half results are rounded once.
#pragma once
#include "limits.h"

extern "C" {  // libm under private names, so that expf(x) in a kernel stays an error
#define __MTL_LIBM1(name) float __mtl_libm_##name(float) __asm__(#name "f");
__MTL_LIBM1(exp) __MTL_LIBM1(exp2) __MTL_LIBM1(exp10) __MTL_LIBM1(log) __MTL_LIBM1(log2) __MTL_LIBM1(log10)
__MTL_LIBM1(sin) __MTL_LIBM1(cos) __MTL_LIBM1(tan) __MTL_LIBM1(asin) __MTL_LIBM1(acos) __MTL_LIBM1(atan)
__MTL_LIBM1(sinh) __MTL_LIBM1(cosh) __MTL_LIBM1(tanh) __MTL_LIBM1(asinh) __MTL_LIBM1(acosh) __MTL_LIBM1(atanh)
__MTL_LIBM1(rint)
#undef __MTL_LIBM1
float __mtl_libm_atan2(float, float) __asm__("atan2f");
float __mtl_libm_pow(float, float) __asm__("powf");
float __mtl_libm_fmod(float, float) __asm__("fmodf");
float __mtl_libm_nextafter(float, float) __asm__("nextafterf");
float __mtl_libm_ldexp(float, int) __asm__("ldexpf");
float __mtl_libm_frexp(float, int *) __asm__("frexpf");
}

// __metal_*: Apple's internal builtins, which MLX's preamble calls; the int selects fast or precise.
#define __MTL_BUILTIN1(name, e) METAL_FUNC float __metal_##name(float x, int = 0) { return e; }
#define __MTL_BUILTIN2(name, e) METAL_FUNC float __metal_##name(float x, float y, int = 0) { return e; }
#define __MTL_BUILTIN3(name, e) METAL_FUNC float __metal_##name(float x, float y, float z, int = 0) { return e; }
__MTL_BUILTIN1(fabs, __builtin_fabsf(x))
__MTL_BUILTIN1(ceil, __builtin_ceilf(x))
__MTL_BUILTIN1(floor, __builtin_floorf(x))
__MTL_BUILTIN1(trunc, __builtin_truncf(x))
__MTL_BUILTIN1(round, __builtin_roundf(x))
__MTL_BUILTIN1(rint, __mtl_libm_rint(x))
__MTL_BUILTIN1(fract, x - __builtin_floorf(x))
__MTL_BUILTIN1(sqrt, __builtin_sqrtf(x))
__MTL_BUILTIN1(rsqrt, 1.0f / __builtin_sqrtf(x))
__MTL_BUILTIN1(exp, __mtl_libm_exp(x))
__MTL_BUILTIN1(exp2, __mtl_libm_exp2(x))
__MTL_BUILTIN1(exp10, __mtl_libm_exp10(x))
__MTL_BUILTIN1(log, __mtl_libm_log(x))
__MTL_BUILTIN1(log2, __mtl_libm_log2(x))
__MTL_BUILTIN1(log10, __mtl_libm_log10(x))
__MTL_BUILTIN1(sin, __mtl_libm_sin(x))
__MTL_BUILTIN1(cos, __mtl_libm_cos(x))
__MTL_BUILTIN1(tan, __mtl_libm_tan(x))
__MTL_BUILTIN1(sinpi, __mtl_libm_sin(M_PI_F * x))
__MTL_BUILTIN1(cospi, __mtl_libm_cos(M_PI_F * x))
__MTL_BUILTIN1(tanpi, __mtl_libm_tan(M_PI_F * x))
__MTL_BUILTIN1(asin, __mtl_libm_asin(x))
__MTL_BUILTIN1(acos, __mtl_libm_acos(x))
__MTL_BUILTIN1(atan, __mtl_libm_atan(x))
__MTL_BUILTIN1(sinh, __mtl_libm_sinh(x))
__MTL_BUILTIN1(cosh, __mtl_libm_cosh(x))
__MTL_BUILTIN1(tanh, __mtl_libm_tanh(x))
__MTL_BUILTIN1(asinh, __mtl_libm_asinh(x))
__MTL_BUILTIN1(acosh, __mtl_libm_acosh(x))
__MTL_BUILTIN1(atanh, __mtl_libm_atanh(x))
__MTL_BUILTIN2(atan2, __mtl_libm_atan2(x, y))
__MTL_BUILTIN2(divide, x / y)
__MTL_BUILTIN2(fmod, __mtl_libm_fmod(x, y))
__MTL_BUILTIN2(pow, __mtl_libm_pow(x, y))
__MTL_BUILTIN2(powr, __mtl_libm_pow(x, y))
__MTL_BUILTIN2(nextafter, __mtl_libm_nextafter(x, y))
__MTL_BUILTIN2(fmax, __builtin_fmaxf(x, y))
__MTL_BUILTIN2(fmin, __builtin_fminf(x, y))
__MTL_BUILTIN3(fma, __builtin_fmaf(x, y, z))
__MTL_BUILTIN3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
__MTL_BUILTIN3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))
__MTL_BUILTIN3(fmedian3, __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z)))
METAL_FUNC float __metal_ldexp(float x, int k, int = 0) { return __mtl_libm_ldexp(x, k); }
METAL_FUNC float __metal_frexp(float x, int *k) { return __mtl_libm_frexp(x, k); }
METAL_FUNC float __metal_frexp(float x, int &k) { return __mtl_libm_frexp(x, &k); }
#undef __MTL_BUILTIN1
#undef __MTL_BUILTIN2
#undef __MTL_BUILTIN3

// A function of one scalar type, component by component on vectors of it.
#define __MTL_MAP1(f, T)                                               \
  template <int N> __MTL_INLINE vec<T, N> f(vec<T, N> a) {             \
    vec<T, N> r;                                                       \
    for (int i = 0; i < N; ++i) r[i] = f((T)a[i]);                     \
    return r;                                                          \
  }
#define __MTL_MAP2(f, T)                                               \
  template <int N> __MTL_INLINE vec<T, N> f(vec<T, N> a, vec<T, N> b) { \
    vec<T, N> r;                                                       \
    for (int i = 0; i < N; ++i) r[i] = f((T)a[i], (T)b[i]);            \
    return r;                                                          \
  }
#define __MTL_MAP3(f, T)                                                            \
  template <int N> __MTL_INLINE vec<T, N> f(vec<T, N> a, vec<T, N> b, vec<T, N> c) { \
    vec<T, N> r;                                                                    \
    for (int i = 0; i < N; ++i) r[i] = f((T)a[i], (T)b[i], (T)c[i]);                \
    return r;                                                                       \
  }
#define __MTL_MATH1F(f) \
  __MTL_INLINE float f(float x) { return __metal_##f(x); } __MTL_MAP1(f, float)
#define __MTL_MATH2F(f) \
  __MTL_INLINE float f(float x, float y) { return __metal_##f(x, y); } __MTL_MAP2(f, float)
#define __MTL_MATH3F(f) \
  __MTL_INLINE float f(float x, float y, float z) { return __metal_##f(x, y, z); } __MTL_MAP3(f, float)
#define __MTL_MATH1(f) \
  __MTL_MATH1F(f) __MTL_INLINE half f(half x) { return (half)__metal_##f((float)x); } __MTL_MAP1(f, half)
#define __MTL_MATH2(f) \
  __MTL_MATH2F(f)                                                                         \
  __MTL_INLINE half f(half x, half y) { return (half)__metal_##f((float)x, (float)y); } \
  __MTL_MAP2(f, half)
#define __MTL_MATH3(f)                                                                                  \
  __MTL_MATH3F(f)                                                                                       \
  __MTL_INLINE half f(half x, half y, half z) { return (half)__metal_##f((float)x, (float)y, (float)z); } \
  __MTL_MAP3(f, half)
#define __MTL_ALL_MATH(X1, X2, X3)                                                                               \
  X1(acos) X1(acosh) X1(asin) X1(asinh) X1(atan) X1(atanh) X1(ceil) X1(cos) X1(cosh) X1(cospi) X1(exp) X1(exp10) \
  X1(exp2) X1(fabs) X1(floor) X1(fract) X1(log) X1(log10) X1(log2) X1(rint) X1(round) X1(rsqrt) X1(sin) X1(sinh) \
  X1(sinpi) X1(sqrt) X1(tan) X1(tanh) X1(tanpi) X1(trunc) X2(atan2) X2(divide) X2(fmax) X2(fmin) X2(fmod) X2(pow) \
  X2(powr) X3(fmax3) X3(fmedian3) X3(fmin3)

namespace metal {
__MTL_ALL_MATH(__MTL_MATH1, __MTL_MATH2, __MTL_MATH3)
__MTL_MATH2(nextafter)

__MTL_INLINE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
__MTL_INLINE half fma(half x, half y, half z) { return (half)(float)((double)x * (double)y + (double)z); }
__MTL_INLINE float copysign(float x, float y) { return __builtin_copysignf(x, y); }
__MTL_INLINE half copysign(half x, half y) { return (half)__builtin_copysignf(x, y); }
__MTL_INLINE float fdim(float x, float y) { return x > y ? x - y : 0.0f; }
__MTL_MAP3(fma, float) __MTL_MAP3(fma, half)
__MTL_MAP2(copysign, float) __MTL_MAP2(copysign, half) __MTL_MAP2(fdim, float)
__MTL_INLINE float ldexp(float x, int k) { return __metal_ldexp(x, k); }
__MTL_INLINE half ldexp(half x, int k) { return (half)__metal_ldexp((float)x, k); }
__MTL_INLINE float frexp(float x, thread int &k) { return __metal_frexp(x, k); }
__MTL_INLINE float modf(float x, thread float &whole) { return x - (whole = __builtin_truncf(x)); }
__MTL_INLINE float sincos(float x, thread float &c) { c = __metal_cos(x); return __metal_sin(x); }

#define __MTL_FLOAT_COMMON(T)                                                                                     \
  __MTL_INLINE T abs(T x) { return (T)__builtin_fabsf((float)x); }                                                \
  __MTL_INLINE T min(T x, T y) { return (T)__metal_fmin((float)x, (float)y); }                                    \
  __MTL_INLINE T max(T x, T y) { return (T)__metal_fmax((float)x, (float)y); }                                    \
  __MTL_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }                                     \
  __MTL_INLINE T min3(T x, T y, T z) { return min(x, min(y, z)); }                                                \
  __MTL_INLINE T max3(T x, T y, T z) { return max(x, max(y, z)); }                                                \
  __MTL_INLINE T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }                             \
  __MTL_INLINE T saturate(T x) { return clamp(x, (T)0.0f, (T)1.0f); }                                             \
  __MTL_INLINE T sign(T x) { return x > 0 ? (T)1.0f : (x < 0 ? (T)-1.0f : (T)0.0f); }                             \
  __MTL_INLINE T mix(T x, T y, T t) { return x + (y - x) * t; }                                                   \
  __MTL_INLINE T step(T edge, T x) { return x < edge ? (T)0.0f : (T)1.0f; }                                       \
  __MTL_INLINE T smoothstep(T a, T b, T x) {                                                                      \
    T t = saturate((T)((x - a) / (b - a)));                                                                       \
    return t * t * ((T)3.0f - (T)2.0f * t);                                                                       \
  }                                                                                                               \
  __MTL_MAP1(abs, T) __MTL_MAP2(min, T) __MTL_MAP2(max, T) __MTL_MAP3(clamp, T) __MTL_MAP1(saturate, T)           \
  __MTL_MAP1(sign, T) __MTL_MAP3(mix, T) __MTL_MAP2(step, T) __MTL_MAP3(smoothstep, T)                            \
  template <int N> __MTL_INLINE vec<T, N> min(vec<T, N> a, T b) { return min(a, (vec<T, N>)b); }                  \
  template <int N> __MTL_INLINE vec<T, N> max(vec<T, N> a, T b) { return max(a, (vec<T, N>)b); }                  \
  template <int N> __MTL_INLINE vec<T, N> clamp(vec<T, N> a, T low, T high) {                                     \
    return clamp(a, (vec<T, N>)low, (vec<T, N>)high);                                                             \
  }                                                                                                               \
  template <int N> __MTL_INLINE vec<T, N> mix(vec<T, N> a, vec<T, N> b, T t) { return a + (b - a) * t; }          \
  template <int N> __MTL_INLINE T dot(vec<T, N> a, vec<T, N> b) {                                                 \
    T s = a[0] * b[0];                                                                                            \
    for (int i = 1; i < N; ++i) s += a[i] * b[i];                                                                 \
    return s;                                                                                                     \
  }                                                                                                               \
  template <int N> __MTL_INLINE T length_squared(vec<T, N> a) { return dot(a, a); }                               \
  template <int N> __MTL_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }                                 \
  template <int N> __MTL_INLINE T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }                    \
  template <int N> __MTL_INLINE vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }                 \
  __MTL_INLINE vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) { return a.yzx * b.zxy - a.zxy * b.yzx; }                \
  __MTL_INLINE constexpr bool isnan(T x) { return __builtin_isnan((float)x); }                                    \
  __MTL_INLINE constexpr bool isinf(T x) { return __builtin_isinf((float)x); }                                    \
  __MTL_INLINE constexpr bool isfinite(T x) { return __builtin_isfinite((float)x); }                              \
  __MTL_INLINE bool isnormal(T x) { return __builtin_isnormal((float)x); }                                        \
  __MTL_INLINE bool signbit(T x) { return __builtin_signbit((float)x); }                                          \
  template <int N> __MTL_INLINE vec<bool, N> isnan(vec<T, N> a) {                                                 \
    vec<bool, N> r;                                                                                               \
    for (int i = 0; i < N; ++i) r[i] = isnan((T)a[i]);                                                            \
    return r;                                                                                                     \
  }                                                                                                               \
  template <int N> __MTL_INLINE vec<bool, N> isinf(vec<T, N> a) {                                                 \
    vec<bool, N> r;                                                                                               \
    for (int i = 0; i < N; ++i) r[i] = isinf((T)a[i]);                                                            \
    return r;                                                                                                     \
  }
__MTL_FLOAT_COMMON(float)
__MTL_FLOAT_COMMON(half)
#undef __MTL_FLOAT_COMMON

#define __MTL_VARIANT                                                                            \
  __MTL_ALL_MATH(__MTL_MATH1F, __MTL_MATH2F, __MTL_MATH3F)                                       \
  __MTL_INLINE float abs(float x) { return __metal_fabs(x); }                                    \
  __MTL_INLINE float min(float x, float y) { return __metal_fmin(x, y); }                        \
  __MTL_INLINE float max(float x, float y) { return __metal_fmax(x, y); }                        \
  __MTL_INLINE float clamp(float x, float low, float high) { return min(max(x, low), high); }    \
  __MTL_MAP1(abs, float) __MTL_MAP2(min, float) __MTL_MAP2(max, float) __MTL_MAP3(clamp, float)
namespace fast {
__MTL_VARIANT
}
namespace precise {
__MTL_VARIANT
}
#undef __MTL_VARIANT

// select, any, all. Comparing vectors gives an integer mask in clang and a bool vector on Metal: both are accepted.
__MTL_INLINE bool all(bool v) { return v; }
__MTL_INLINE bool any(bool v) { return v; }
#define __MTL_MASK(M, condition)                                                                          \
  template <class T, int N>                                                                               \
  __MTL_INLINE enable_if_t<condition, vec<T, N>> select(vec<T, N> a, vec<T, N> b, vec<M, N> c) {          \
    vec<T, N> r;                                                                                          \
    for (int i = 0; i < N; ++i) r[i] = c[i] ? b[i] : a[i];                                                \
    return r;                                                                                             \
  }                                                                                                       \
  template <int N> __MTL_INLINE bool all(vec<M, N> v) {                                                   \
    bool r = true;                                                                                        \
    for (int i = 0; i < N; ++i) r = r && v[i];                                                            \
    return r;                                                                                             \
  }                                                                                                       \
  template <int N> __MTL_INLINE bool any(vec<M, N> v) {                                                   \
    bool r = false;                                                                                       \
    for (int i = 0; i < N; ++i) r = r || v[i];                                                            \
    return r;                                                                                             \
  }
__MTL_MASK(bool, true)
__MTL_MASK(signed char, sizeof(T) == 1)
__MTL_MASK(char, sizeof(T) == 1)
__MTL_MASK(short, sizeof(T) == 2)
__MTL_MASK(int, sizeof(T) == 4)
__MTL_MASK(long, sizeof(T) == 8)
#undef __MTL_MASK
#define __MTL_SELECT(T) __MTL_INLINE constexpr T select(T a, T b, bool c) { return c ? b : a; }
__MTL_INTEGER_TYPES(__MTL_SELECT) __MTL_SELECT(bool) __MTL_SELECT(half) __MTL_SELECT(bfloat) __MTL_SELECT(float)
#undef __MTL_SELECT
}  // namespace metal
