// Keywords and scalar types of the Metal shading language, as plain C++ for clang.
// Written from the public specification. No libc header is included on purpose: a libc or libm name (expf, erf, printf,
// std::...) must stay an error, as it is on Metal.
#pragma once

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define half _Float16
#define bfloat __bf16

#define __METAL__ 1
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2
#define METAL_FUNC inline __attribute__((__always_inline__))
#define __MTL_INLINE inline __attribute__((__always_inline__))
#define __MTL_OUTLINE inline __attribute__((__noinline__))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;

// literals 1.0h and 1.0bf (rewritten by prep.py)
__MTL_INLINE constexpr half __mtl_half(float x) { return (half)x; }
__MTL_INLINE constexpr bfloat __mtl_bfloat(float x) { return (bfloat)x; }

// X-macro lists: every overloaded function exists once per exact type, so that a call with mixed types is ambiguous, as
// it is on Metal.
#define __MTL_SIGNED_TYPES(X) X(signed char) X(short) X(int) X(long)
#define __MTL_UNSIGNED_TYPES(X) X(uchar) X(ushort) X(uint) X(ulong)
#define __MTL_INTEGER_TYPES(X) __MTL_SIGNED_TYPES(X) __MTL_UNSIGNED_TYPES(X)
