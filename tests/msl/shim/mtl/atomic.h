// <metal_atomic>: relaxed order only, float addition only in device memory.
#pragma once
#include "runtime.h"
#include "traits.h"

namespace metal {
enum memory_order { memory_order_relaxed = 0 };
template <class T>
struct atomic {
  T __value;
};
template <class T>
using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

// All threads share one operating-system thread and switch only at barriers and SIMD functions: plain accesses are
// atomic.
#define __MTL_ATOMIC(space, number)                                                                           \
  template <class T>                                                                                          \
  __MTL_INLINE T *__atomic_access(const volatile space atomic<T> *p, bool load, bool store, uint site) {      \
    T *address = (T *)(unsigned long)p;                                                                       \
    mtl_check_atomic(address, sizeof(T), number, load, store, site);                                          \
    return address;                                                                                           \
  }                                                                                                           \
  template <class T>                                                                                          \
  __MTL_INLINE T atomic_load_explicit(const volatile space atomic<T> *p, memory_order, __MTL_SITE) {          \
    return *__atomic_access(p, true, false, __site);                                                          \
  }                                                                                                           \
  template <class T>                                                                                          \
  __MTL_INLINE void atomic_store_explicit(volatile space atomic<T> *p, enable_if_t<true, T> v, memory_order,  \
                                          __MTL_SITE) {                                                       \
    *__atomic_access(p, false, true, __site) = v;                                                             \
  }                                                                                                           \
  template <class T>                                                                                          \
  __MTL_INLINE T atomic_exchange_explicit(volatile space atomic<T> *p, enable_if_t<true, T> v, memory_order,  \
                                          __MTL_SITE) {                                                       \
    T *address = __atomic_access(p, true, true, __site), old = *address;                                      \
    *address = v;                                                                                             \
    return old;                                                                                               \
  }                                                                                                           \
  template <class T>                                                                                          \
  __MTL_INLINE bool atomic_compare_exchange_weak_explicit(volatile space atomic<T> *p, thread T *expected,    \
                                                          enable_if_t<true, T> v, memory_order, memory_order, \
                                                          __MTL_SITE) {                                       \
    T *address = __atomic_access(p, true, true, __site), old = *address;                                      \
    bool equal = __builtin_memcmp(&old, expected, sizeof(T)) == 0;                                            \
    if (equal)                                                                                                \
      *address = v;                                                                                           \
    else                                                                                                      \
      *expected = old;                                                                                        \
    return equal;                                                                                             \
  }                                                                                                           \
  __MTL_ATOMIC_INTEGERS(space, fetch_add, (T)((make_unsigned_t<T>)a + (make_unsigned_t<T>)b))                 \
  __MTL_ATOMIC_INTEGERS(space, fetch_sub, (T)((make_unsigned_t<T>)a - (make_unsigned_t<T>)b))                 \
  __MTL_ATOMIC_INTEGERS(space, fetch_max, a > b ? a : b)                                                      \
  __MTL_ATOMIC_INTEGERS(space, fetch_min, a < b ? a : b)                                                      \
  __MTL_ATOMIC_INTEGERS(space, fetch_and, a & b)                                                               \
  __MTL_ATOMIC_INTEGERS(space, fetch_or, a | b)                                                               \
  __MTL_ATOMIC_INTEGERS(space, fetch_xor, a ^ b)
#define __MTL_ATOMIC_FETCH(space, type, name, e)                                                                 \
  __MTL_INLINE type atomic_##name##_explicit(volatile space atomic<type> *p, type b, memory_order, __MTL_SITE) { \
    typedef type T;                                                                                              \
    T *address = __atomic_access(p, true, true, __site), a = *address;                                           \
    *address = e;                                                                                                \
    return a;                                                                                                    \
  }
#define __MTL_ATOMIC_INTEGERS(space, name, e) \
  __MTL_ATOMIC_FETCH(space, int, name, e) __MTL_ATOMIC_FETCH(space, uint, name, e)
__MTL_ATOMIC(device, 1)
__MTL_ATOMIC(threadgroup, 3)
__MTL_ATOMIC_FETCH(device, float, fetch_add, a + b)
__MTL_ATOMIC_FETCH(device, float, fetch_sub, a - b)
#undef __MTL_ATOMIC
#undef __MTL_ATOMIC_INTEGERS
#undef __MTL_ATOMIC_FETCH
}  // namespace metal
