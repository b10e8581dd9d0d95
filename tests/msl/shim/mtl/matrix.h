// <metal_simdgroup_matrix>: 8x8 matrices spread over the 32 lanes of a SIMD-group, two neighbouring columns per lane.
// The lane layout of thread_elements() is the undocumented but stable one that MLX's steel kernels rely on.
#pragma once
#include "simd.h"

namespace __mtl {
struct place {
  uint row, column;
};
__MTL_INLINE place place_of(uint lane) {
  uint quad = lane / 4;
  return {(quad & 4) + ((lane / 2) & 3), (quad & 2) * 2 + (lane & 1) * 2};
}

// Each lane's part of d = a b + c. The runtime computes the whole product when the first lane resumes.
struct operands {
  float a[2], b[2], c[2];
};
__MTL_OUTLINE metal::vec<float, 2> matrix_product(operands mine, unsigned site) {
  __mtl_exchange *e = enter(mine, MATRIX_PRODUCT, 0, __MTL_CALLER, site);
  if (!e->ready) {
    for (unsigned lane = 0; lane < 32; ++lane)
      if (!active(e, lane)) mtl_simd_bad_lane(lane, site);
    mtl_matrix_product(e);
  }
  place p = place_of(mtl_simd_lane());
  const float *result = (const float *)e->result + p.row * 8 + p.column;
  return {result[0], result[1]};
}
}  // namespace __mtl

namespace metal {
template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "only 8x8 simdgroup matrices exist");
};
template <class T>
struct simdgroup_matrix<T, 8, 8> {
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>,
                "the element of a simdgroup_matrix must be half, bfloat or float");
  vec<T, 2> __elements;
  __MTL_INLINE simdgroup_matrix() {}
  __MTL_INLINE explicit simdgroup_matrix(T diagonal) {
    __mtl::place p = __mtl::place_of(mtl_simd_lane());
    __elements[0] = p.row == p.column ? diagonal : (T)0.0f;
    __elements[1] = p.row == p.column + 1 ? diagonal : (T)0.0f;
  }
  __MTL_INLINE thread vec<T, 2> &thread_elements() thread { return __elements; }
  __MTL_INLINE const thread vec<T, 2> &thread_elements() const thread { return __elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R = C>
__MTL_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m;
  m.__elements = v;
  return m;
}

#define __MTL_MATRIX_MEMORY(space)                                                                                   \
  template <class T, int C, int R>                                                                                   \
  __MTL_INLINE void simdgroup_load(thread simdgroup_matrix<T, C, R> &d, const space T *source, ulong per_row = C,    \
                                   ulong2 origin = (ulong2)0, bool transpose = false, __MTL_SITE) {                  \
    __mtl::place p = __mtl::place_of(mtl_simd_lane());                                                               \
    __mtl::meet(0, __mtl::MATRIX_LOAD, __site);                                                                      \
    source += origin.y * per_row + origin.x;                                                                         \
    d.__elements[0] = transpose ? source[p.column * per_row + p.row] : source[p.row * per_row + p.column];           \
    d.__elements[1] = transpose ? source[(p.column + 1) * per_row + p.row] : source[p.row * per_row + p.column + 1]; \
  }                                                                                                                  \
  template <class T, int C, int R>                                                                                   \
  __MTL_INLINE void simdgroup_store(simdgroup_matrix<T, C, R> s, space T *target, ulong per_row = C,                 \
                                    ulong2 origin = (ulong2)0, bool transpose = false, __MTL_SITE) {                 \
    __mtl::place p = __mtl::place_of(mtl_simd_lane());                                                               \
    __mtl::meet(0, __mtl::MATRIX_STORE, __site);                                                                     \
    target += origin.y * per_row + origin.x;                                                                         \
    target[transpose ? p.column * per_row + p.row : p.row * per_row + p.column] = s.__elements[0];                   \
    target[transpose ? (p.column + 1) * per_row + p.row : p.row * per_row + p.column + 1] = s.__elements[1];         \
  }
__MTL_MATRIX_MEMORY(device)
__MTL_MATRIX_MEMORY(threadgroup)
#undef __MTL_MATRIX_MEMORY

// d = a b + c, accumulated in float over k = 0..7 with fused multiply-adds, rounded to the type of d at the end.
template <class TD, class TA, class TB, class TC>
__MTL_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<TD, 8, 8> &d, simdgroup_matrix<TA, 8, 8> a,
                                                simdgroup_matrix<TB, 8, 8> b, simdgroup_matrix<TC, 8, 8> c,
                                                __MTL_SITE) {
  vec<float, 2> r = __mtl::matrix_product({{(float)a.__elements[0], (float)a.__elements[1]},
                                           {(float)b.__elements[0], (float)b.__elements[1]},
                                           {(float)c.__elements[0], (float)c.__elements[1]}},
                                          __site);
  d.__elements[0] = (TD)r[0];
  d.__elements[1] = (TD)r[1];
}
template <class TD, class TA, class TB>
__MTL_INLINE void simdgroup_multiply(thread simdgroup_matrix<TD, 8, 8> &d, simdgroup_matrix<TA, 8, 8> a,
                                     simdgroup_matrix<TB, 8, 8> b, __MTL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), __site);
}
}  // namespace metal
