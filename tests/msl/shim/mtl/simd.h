// Barriers, SIMD-group and quad-group functions: rendezvous points of the runtime.
#pragma once
#include "integer.h"
#include "runtime.h"

namespace metal {
enum class mem_flags : uint {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8
};
__MTL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
__MTL_INLINE void threadgroup_barrier(mem_flags flags, __MTL_SITE) { mtl_threadgroup_barrier((uint)flags, __site); }
__MTL_INLINE void simdgroup_barrier(mem_flags flags, __MTL_SITE) { mtl_simdgroup_barrier((uint)flags, __site); }
}  // namespace metal

namespace __mtl {
enum op {
  SUM, PRODUCT, MIN, MAX, AND, OR, XOR, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, ROTATE_UP, ROTATE_DOWN, FILL_UP,
  FILL_DOWN, BROADCAST, BROADCAST_FIRST, SCAN_INCLUSIVE, SCAN_EXCLUSIVE, BALLOT, ACTIVE, QUAD,
  MATRIX_LOAD, MATRIX_STORE, MATRIX_PRODUCT
};
struct sum { static constexpr int op = SUM; template <class T> static T f(T a, T b) { return a + b; } };
struct product { static constexpr int op = PRODUCT; template <class T> static T f(T a, T b) { return a * b; } };
struct minimum { static constexpr int op = MIN; template <class T> static T f(T a, T b) { return metal::min(a, b); } };
struct maximum { static constexpr int op = MAX; template <class T> static T f(T a, T b) { return metal::max(a, b); } };
struct bit_and { static constexpr int op = AND; template <class T> static T f(T a, T b) { return a & b; } };
struct bit_or { static constexpr int op = OR; template <class T> static T f(T a, T b) { return a | b; } };
struct bit_xor { static constexpr int op = XOR; template <class T> static T f(T a, T b) { return a ^ b; } };

// Where the lanes meet. `uniform` is what all must agree on (a delta or lane number). The functions below are not inlined,
// so that the return address tells from which call in the kernel they come.
#define __MTL_CALLER __builtin_return_address(0)
template <class T>
__MTL_INLINE __mtl_exchange *enter(T x, int op, int uniform, const void *caller, unsigned site) {
  static_assert(sizeof(T) <= 32, "value too large for a SIMD function");
  return mtl_simd_enter(&x, sizeof(T), op, uniform, caller, site);
}
__MTL_INLINE bool active(const __mtl_exchange *e, unsigned lane) { return lane < 32 && ((e->mask >> lane) & 1); }
template <class T> __MTL_INLINE T get(const __mtl_exchange *e, unsigned lane, unsigned site) {
  if (!active(e, lane)) mtl_simd_bad_lane(lane, site);
  T r;
  __builtin_memcpy(&r, e->slot[lane & 31], sizeof(T));
  return r;
}

// Reductions combine lanes 1, 2, 4, 8 and 16 apart, in this order, skipping inactive lanes. The lane that resumes first
// computes the result for all.
template <class T, class O> __MTL_OUTLINE void combine(__mtl_exchange *e) {
  T v[32];
  unsigned mask = e->mask;
  for (int i = 0; i < 32; ++i) __builtin_memcpy(&v[i], e->slot[i], sizeof(T));
  for (int d = 1; d < 32; d *= 2)
    for (int i = 0; i < 32; i += 2 * d) {
      if (!((mask >> (i + d)) & 1)) continue;
      v[i] = (mask >> i) & 1 ? O::f(v[i], v[i + d]) : v[i + d];
      mask |= 1u << i;
    }
  __builtin_memcpy(e->result, &v[0], sizeof(T));
  e->ready = 1;
}
template <class T, class O> __MTL_OUTLINE T reduce(T x, unsigned site) {
  __mtl_exchange *e = enter(x, O::op, 0, __MTL_CALLER, site);
  if (!e->ready) combine<T, O>(e);
  T r;
  __builtin_memcpy(&r, e->result, sizeof(T));
  return r;
}
template <class T, class O> __MTL_OUTLINE T scan(T x, T identity, bool inclusive, unsigned site) {
  unsigned end = mtl_simd_lane() + inclusive;
  __mtl_exchange *e = enter(x, (inclusive ? SCAN_INCLUSIVE : SCAN_EXCLUSIVE) + 64 * O::op, 0, __MTL_CALLER, site);
  T r = identity;
  for (unsigned i = 0; i < end; ++i)
    if (active(e, i)) r = O::f(r, get<T>(e, i, site));
  return r;
}
template <class T, class O> __MTL_OUTLINE T quad_reduce(T x, unsigned site) {
  unsigned first = mtl_simd_lane() & ~3u;
  __mtl_exchange *e = enter(x, QUAD + 64 * O::op, 0, __MTL_CALLER, site);
  T a = O::f(get<T>(e, first, site), get<T>(e, first + 1, site));
  return O::f(a, O::f(get<T>(e, first + 2, site), get<T>(e, first + 3, site)));
}
template <class T> __MTL_OUTLINE T shuffle(T x, unsigned lane, unsigned site) {
  return get<T>(enter(x, SHUFFLE, 0, __MTL_CALLER, site), lane, site);
}
template <class T> __MTL_OUTLINE T shuffle_xor(T x, unsigned mask, unsigned site) {
  unsigned me = mtl_simd_lane();
  return get<T>(enter(x, SHUFFLE_XOR, (int)mask, __MTL_CALLER, site), me ^ mask, site);
}
template <class T> __MTL_OUTLINE T shuffle_up(T x, unsigned delta, unsigned site) {
  unsigned me = mtl_simd_lane();
  __mtl_exchange *e = enter(x, SHUFFLE_UP, (int)delta, __MTL_CALLER, site);
  return me < delta ? x : get<T>(e, me - delta, site);
}
template <class T> __MTL_OUTLINE T shuffle_down(T x, unsigned delta, unsigned site) {
  unsigned me = mtl_simd_lane();
  __mtl_exchange *e = enter(x, SHUFFLE_DOWN, (int)delta, __MTL_CALLER, site);
  return me + delta > 31 ? x : get<T>(e, me + delta, site);
}
template <class T> __MTL_OUTLINE T rotate_up(T x, unsigned delta, unsigned site) {
  unsigned me = mtl_simd_lane();
  return get<T>(enter(x, ROTATE_UP, (int)delta, __MTL_CALLER, site), (me - delta) & 31, site);
}
template <class T> __MTL_OUTLINE T rotate_down(T x, unsigned delta, unsigned site) {
  unsigned me = mtl_simd_lane();
  return get<T>(enter(x, ROTATE_DOWN, (int)delta, __MTL_CALLER, site), (me + delta) & 31, site);
}
template <class T> struct pair { T value, filling; };
template <class T> __MTL_OUTLINE T fill_up(T x, T filling, unsigned delta, unsigned modulo, unsigned site) {
  unsigned me = mtl_simd_lane(), within = me % modulo;
  __mtl_exchange *e = enter(pair<T>{x, filling}, FILL_UP, (int)delta, __MTL_CALLER, site);
  if (within >= delta) return get<pair<T>>(e, me - delta, site).value;
  return get<pair<T>>(e, me - within + (modulo - delta + within), site).filling;
}
template <class T> __MTL_OUTLINE T fill_down(T x, T filling, unsigned delta, unsigned modulo, unsigned site) {
  unsigned me = mtl_simd_lane(), within = me % modulo;
  __mtl_exchange *e = enter(pair<T>{x, filling}, FILL_DOWN, (int)delta, __MTL_CALLER, site);
  if (within + delta < modulo) return get<pair<T>>(e, me + delta, site).value;
  return get<pair<T>>(e, me - within + (within + delta - modulo), site).filling;
}
template <class T> __MTL_OUTLINE T broadcast(T x, unsigned lane, unsigned site) {
  return get<T>(enter(x, BROADCAST, (int)lane, __MTL_CALLER, site), lane, site);
}
template <class T> __MTL_OUTLINE T broadcast_first(T x, unsigned site) {
  __mtl_exchange *e = enter(x, BROADCAST_FIRST, 0, __MTL_CALLER, site);
  return get<T>(e, __builtin_ctz(e->mask), site);
}
__MTL_OUTLINE __mtl_exchange *meet(int x, int op, unsigned site) { return enter(x, op, 0, __MTL_CALLER, site); }
__MTL_INLINE unsigned quad_lane(unsigned lane) { return (mtl_simd_lane() & ~3u) + lane; }
}  // namespace __mtl

#define __MTL_COMMUNICATION(T)                                                                                       \
  __MTL_INLINE T simd_shuffle(T x, ushort lane, __MTL_SITE) { return __mtl::shuffle<T>(x, lane, __site); }           \
  __MTL_INLINE T simd_shuffle_xor(T x, ushort mask, __MTL_SITE) { return __mtl::shuffle_xor<T>(x, mask, __site); }   \
  __MTL_INLINE T simd_shuffle_up(T x, ushort delta, __MTL_SITE) { return __mtl::shuffle_up<T>(x, delta, __site); }   \
  __MTL_INLINE T simd_shuffle_down(T x, ushort delta, __MTL_SITE) {                                                  \
    return __mtl::shuffle_down<T>(x, delta, __site);                                                                 \
  }                                                                                                                  \
  __MTL_INLINE T simd_shuffle_rotate_up(T x, ushort delta, __MTL_SITE) {                                             \
    return __mtl::rotate_up<T>(x, delta, __site);                                                                    \
  }                                                                                                                  \
  __MTL_INLINE T simd_shuffle_rotate_down(T x, ushort delta, __MTL_SITE) {                                           \
    return __mtl::rotate_down<T>(x, delta, __site);                                                                  \
  }                                                                                                                  \
  __MTL_INLINE T simd_shuffle_and_fill_up(T x, T filling, ushort delta, __MTL_SITE) {                                \
    return __mtl::fill_up<T>(x, filling, delta, 32, __site);                                                         \
  }                                                                                                                  \
  __MTL_INLINE T simd_shuffle_and_fill_down(T x, T filling, ushort delta, __MTL_SITE) {                              \
    return __mtl::fill_down<T>(x, filling, delta, 32, __site);                                                       \
  }                                                                                                                  \
  __MTL_INLINE T simd_broadcast(T x, ushort lane, __MTL_SITE) { return __mtl::broadcast<T>(x, lane, __site); }       \
  __MTL_INLINE T simd_broadcast_first(T x, __MTL_SITE) { return __mtl::broadcast_first<T>(x, __site); }              \
  __MTL_INLINE T quad_shuffle(T x, ushort lane, __MTL_SITE) {                                                        \
    return __mtl::shuffle<T>(x, __mtl::quad_lane(lane), __site);                                                     \
  }                                                                                                                  \
  __MTL_INLINE T quad_broadcast(T x, ushort lane, __MTL_SITE) {                                                      \
    return __mtl::shuffle<T>(x, __mtl::quad_lane(lane), __site);                                                     \
  }                                                                                                                  \
  __MTL_INLINE T quad_shuffle_xor(T x, ushort mask, __MTL_SITE) { return __mtl::shuffle_xor<T>(x, mask, __site); }
#define __MTL_REDUCTION(T)                                                                                           \
  __MTL_INLINE T simd_sum(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::sum>(x, __site); }                       \
  __MTL_INLINE T simd_product(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::product>(x, __site); }               \
  __MTL_INLINE T simd_min(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::minimum>(x, __site); }                   \
  __MTL_INLINE T simd_max(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::maximum>(x, __site); }                   \
  __MTL_INLINE T simd_prefix_inclusive_sum(T x, __MTL_SITE) {                                                        \
    return __mtl::scan<T, __mtl::sum>(x, 0, true, __site);                                                           \
  }                                                                                                                  \
  __MTL_INLINE T simd_prefix_exclusive_sum(T x, __MTL_SITE) {                                                        \
    return __mtl::scan<T, __mtl::sum>(x, 0, false, __site);                                                          \
  }                                                                                                                  \
  __MTL_INLINE T simd_prefix_inclusive_product(T x, __MTL_SITE) {                                                    \
    return __mtl::scan<T, __mtl::product>(x, 1, true, __site);                                                       \
  }                                                                                                                  \
  __MTL_INLINE T simd_prefix_exclusive_product(T x, __MTL_SITE) {                                                    \
    return __mtl::scan<T, __mtl::product>(x, 1, false, __site);                                                      \
  }                                                                                                                  \
  __MTL_INLINE T quad_sum(T x, __MTL_SITE) { return __mtl::quad_reduce<T, __mtl::sum>(x, __site); }                  \
  __MTL_INLINE T quad_min(T x, __MTL_SITE) { return __mtl::quad_reduce<T, __mtl::minimum>(x, __site); }              \
  __MTL_INLINE T quad_max(T x, __MTL_SITE) { return __mtl::quad_reduce<T, __mtl::maximum>(x, __site); }
#define __MTL_BITWISE(T)                                                                                             \
  __MTL_INLINE T simd_and(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::bit_and>(x, __site); }                   \
  __MTL_INLINE T simd_or(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::bit_or>(x, __site); }                     \
  __MTL_INLINE T simd_xor(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::bit_xor>(x, __site); }
// No bool, no 64-bit integers and no bfloat, as in Apple's headers; MLX adds some of them in its preamble.
#define __MTL_SMALL_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint)
#define __MTL_WITH_VECTORS(X, T) X(T) X(T##2) X(T##3) X(T##4)

namespace metal {
__MTL_WITH_VECTORS(__MTL_COMMUNICATION, char) __MTL_WITH_VECTORS(__MTL_COMMUNICATION, uchar)
__MTL_WITH_VECTORS(__MTL_COMMUNICATION, short) __MTL_WITH_VECTORS(__MTL_COMMUNICATION, ushort)
__MTL_WITH_VECTORS(__MTL_COMMUNICATION, int) __MTL_WITH_VECTORS(__MTL_COMMUNICATION, uint)
__MTL_WITH_VECTORS(__MTL_COMMUNICATION, float)
__MTL_COMMUNICATION(half) __MTL_COMMUNICATION(half2) __MTL_COMMUNICATION(half3) __MTL_COMMUNICATION(half4)
__MTL_SMALL_INTEGERS(__MTL_REDUCTION) __MTL_REDUCTION(half) __MTL_REDUCTION(float)
__MTL_SMALL_INTEGERS(__MTL_BITWISE)
#define __MTL_VECTOR_SUM(T) __MTL_INLINE T simd_sum(T x, __MTL_SITE) { return __mtl::reduce<T, __mtl::sum>(x, __site); }
__MTL_VECTOR_SUM(float2) __MTL_VECTOR_SUM(float3) __MTL_VECTOR_SUM(float4)
__MTL_VECTOR_SUM(half2) __MTL_VECTOR_SUM(half3) __MTL_VECTOR_SUM(half4)

struct simd_vote {
  typedef ulong vote_t;
  ulong v;
  constexpr explicit simd_vote(ulong x = 0) : v(x) {}
  constexpr explicit operator ulong() const { return v; }
  constexpr bool all() const { return v == 0xffffffffu; }
  constexpr bool any() const { return v != 0; }
};
__MTL_INLINE simd_vote simd_ballot(bool vote, __MTL_SITE) {
  __mtl_exchange *e = __mtl::meet((int)vote, __mtl::BALLOT, __site);
  ulong votes = 0;
  for (unsigned i = 0; i < 32; ++i)
    if (__mtl::active(e, i) && __mtl::get<int>(e, i, __site)) votes |= 1ul << i;
  return simd_vote(votes);
}
__MTL_INLINE bool simd_all(bool vote, __MTL_SITE) { return __mtl::reduce<int, __mtl::bit_and>(vote, __site) != 0; }
__MTL_INLINE bool simd_any(bool vote, __MTL_SITE) { return __mtl::reduce<int, __mtl::bit_or>(vote, __site) != 0; }
__MTL_INLINE simd_vote simd_active_threads_mask(__MTL_SITE) {
  return simd_vote(__mtl::meet(0, __mtl::ACTIVE, __site)->mask);
}
__MTL_INLINE bool simd_is_first(__MTL_SITE) {
  unsigned me = mtl_simd_lane();
  return (unsigned)__builtin_ctz(__mtl::meet(0, __mtl::ACTIVE, __site)->mask) == me;
}
}  // namespace metal

// Apple-internal builtins that MLX's preamble calls for bfloat.
#define __MTL_INTERNAL1(f) METAL_FUNC float __metal_##f(float x, __MTL_SITE) { return metal::f(x, __site); }
__MTL_INTERNAL1(simd_sum) __MTL_INTERNAL1(simd_product) __MTL_INTERNAL1(simd_min) __MTL_INTERNAL1(simd_max)
__MTL_INTERNAL1(simd_prefix_inclusive_sum) __MTL_INTERNAL1(simd_prefix_exclusive_sum)
__MTL_INTERNAL1(simd_prefix_inclusive_product) __MTL_INTERNAL1(simd_prefix_exclusive_product)
float __metal_simd_xor(float x);  // bitwise on a float: MLX declares it; a kernel that used it would not load
#define __MTL_INTERNAL2(f) \
  METAL_FUNC ushort __metal_##f(ushort x, ushort k, __MTL_SITE) { return metal::f(x, k, __site); }
__MTL_INTERNAL2(simd_broadcast) __MTL_INTERNAL2(simd_shuffle) __MTL_INTERNAL2(simd_shuffle_xor)
__MTL_INTERNAL2(simd_shuffle_up) __MTL_INTERNAL2(simd_shuffle_down)
__MTL_INTERNAL2(simd_shuffle_rotate_up) __MTL_INTERNAL2(simd_shuffle_rotate_down)
METAL_FUNC ushort __metal_simd_shuffle_and_fill_up(ushort x, ushort f, ushort d, ushort m, __MTL_SITE) {
  return __mtl::fill_up<ushort>(x, f, d, m, __site);
}
METAL_FUNC ushort __metal_simd_shuffle_and_fill_down(ushort x, ushort f, ushort d, ushort m, __MTL_SITE) {
  return __mtl::fill_down<ushort>(x, f, d, m, __site);
}
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return (ushort)mtl_simd_lane(); }
