// <metal_limits> and the macros for constants.
#pragma once
#include "traits.h"

namespace metal {
template <class T> struct numeric_limits;

#define __MTL_INTEGER_LIMITS(T, MIN, MAX, SIGNED)                                           \
  template <> struct numeric_limits<T> {                                                    \
    static constexpr constant bool is_specialized = true, is_signed = SIGNED, is_integer = true; \
    static constexpr constant int digits = sizeof(T) * 8 - SIGNED;                          \
    static constexpr T min() { return (T)(MIN); }                                           \
    static constexpr T max() { return (T)(MAX); }                                           \
    static constexpr T lowest() { return (T)(MIN); }                                        \
    static constexpr T infinity() { return 0; }                                             \
    static constexpr T quiet_NaN() { return 0; }                                            \
    static constexpr T epsilon() { return 0; }                                              \
  };
__MTL_INTEGER_LIMITS(bool, 0, 1, 0)
__MTL_INTEGER_LIMITS(char, -128, 127, 1)
__MTL_INTEGER_LIMITS(signed char, -128, 127, 1)
__MTL_INTEGER_LIMITS(uchar, 0, 255, 0)
__MTL_INTEGER_LIMITS(short, -32768, 32767, 1)
__MTL_INTEGER_LIMITS(ushort, 0, 65535, 0)
__MTL_INTEGER_LIMITS(int, (-2147483647 - 1), 2147483647, 1)
__MTL_INTEGER_LIMITS(uint, 0, 4294967295u, 0)
__MTL_INTEGER_LIMITS(long, (-9223372036854775807l - 1), 9223372036854775807l, 1)
__MTL_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul, 0)
#undef __MTL_INTEGER_LIMITS

#define __MTL_FLOAT_LIMITS(T, U, MIN, MAX, EPSILON, INF, QNAN, DIGITS)                      \
  template <> struct numeric_limits<T> {                                                    \
    static constexpr constant bool is_specialized = true, is_signed = true, is_integer = false; \
    static constexpr constant int digits = DIGITS;                                          \
    static constexpr T min() { return __builtin_bit_cast(T, (U)MIN); }                      \
    static constexpr T max() { return __builtin_bit_cast(T, (U)MAX); }                      \
    static constexpr T lowest() { return -max(); }                                          \
    static constexpr T epsilon() { return __builtin_bit_cast(T, (U)EPSILON); }              \
    static constexpr T infinity() { return __builtin_bit_cast(T, (U)INF); }                 \
    static constexpr T quiet_NaN() { return __builtin_bit_cast(T, (U)QNAN); }               \
  };
__MTL_FLOAT_LIMITS(float, uint, 0x00800000u, 0x7f7fffffu, 0x34000000u, 0x7f800000u, 0x7fc00000u, 24)
__MTL_FLOAT_LIMITS(half, ushort, 0x0400, 0x7bff, 0x1400, 0x7c00, 0x7e00, 11)
__MTL_FLOAT_LIMITS(bfloat, ushort, 0x0080, 0x7f7f, 0x3c00, 0x7f80, 0x7fc0, 8)
#undef __MTL_FLOAT_LIMITS
}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.40282346638528859812e+38f
#define FLT_MAX 3.40282346638528859812e+38f
#define FLT_MIN 1.17549435082228750797e-38f
#define FLT_EPSILON 1.1920928955078125e-07f
#define HALF_MAX __mtl_half(65504.0f)
#define HALF_MIN __mtl_half(6.103515625e-05f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define M_E_F 2.71828174591064453125f
#define M_LOG2E_F 1.44269502162933349609f
#define M_LN10_F 2.30258512496948242188f
#define M_LN2_F 0.693147182464599609375f
#define M_SQRT2_F 1.41421353816986083984f
#define M_PI_F 3.14159274101257324219f
#define M_PI_2_F 1.57079637050628662109f
#define M_1_PI_F 0.318309873342514038086f
#define M_2_PI_F 0.636619746685028076172f
