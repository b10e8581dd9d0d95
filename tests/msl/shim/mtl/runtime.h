// Entry points of the runtime (rt/). A site is a source position packed as line << 10 | column.
#pragma once
#include "keywords.h"

struct __mtl_exchange {  // Exchange in rt/abi.h
  unsigned mask, ready;
  alignas(32) unsigned char result[256];
  alignas(32) unsigned char slot[32][32];
};

extern "C" {
#define __MTL_CONVERGENT __attribute__((convergent, noinline))
__mtl_exchange *mtl_simd_enter(const void *value, unsigned size, int op, int uniform, const void *caller,
                               unsigned site) __MTL_CONVERGENT;
void mtl_simd_bad_lane(unsigned lane, unsigned site);
unsigned mtl_simd_lane(void);
void mtl_matrix_product(__mtl_exchange *exchange);
void mtl_simdgroup_barrier(unsigned flags, unsigned site) __MTL_CONVERGENT;
void mtl_threadgroup_barrier(unsigned flags, unsigned site) __MTL_CONVERGENT;
void *mtl_threadgroup_variable(unsigned id, unsigned long size, unsigned long align, unsigned element, const char *name,
                               unsigned zeroed, unsigned site);
void mtl_check_atomic(const void *p, unsigned size, unsigned space, unsigned is_load, unsigned is_store, unsigned site);
#undef __MTL_CONVERGENT
}

// Last parameter of every function that needs to know where it was called.
#define __MTL_SITE unsigned __site = (__builtin_LINE() << 10) + (__builtin_COLUMN() & 1023)

// `threadgroup T name;` (rewritten by prep.py)
namespace __mtl {
template <class T> struct scalar_of { static constexpr unsigned bytes = alignof(T); };
template <class T, unsigned long N> struct scalar_of<T[N]> : scalar_of<T> {};
template <class S> struct scalar_of<S __attribute__((ext_vector_type(2)))> : scalar_of<S> {};
template <class S> struct scalar_of<S __attribute__((ext_vector_type(3)))> : scalar_of<S> {};
template <class S> struct scalar_of<S __attribute__((ext_vector_type(4)))> : scalar_of<S> {};
}  // namespace __mtl
template <class T>
__MTL_INLINE threadgroup T &__mtl_threadgroup_variable(unsigned id, const char *name, unsigned zeroed, __MTL_SITE) {
  constexpr unsigned element = __mtl::scalar_of<T>::bytes;
  void *address = mtl_threadgroup_variable(id, sizeof(T), alignof(T), element, name, zeroed, __site);
  return *(threadgroup T *)(unsigned long)address;
}
