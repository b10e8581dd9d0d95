// <metal_type_traits>: the subset Apple's header has (void_t and is_empty, for example, do not exist there).
#pragma once
#include "vector.h"

namespace metal {
template <class T, T v> struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;

template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> struct remove_volatile { typedef T type; };
template <class T> struct remove_volatile<volatile T> { typedef T type; };
template <class T> struct remove_cv { typedef typename remove_volatile<typename remove_const<T>::type>::type type; };
template <class T> struct remove_addrspace { typedef T type; };
template <class T> struct remove_reference { typedef T type; };
template <class T> struct remove_reference<T &> { typedef T type; };
template <class T> struct remove_reference<T &&> { typedef T type; };
template <class T> struct remove_pointer { typedef T type; };
template <class T> struct remove_pointer<T *> { typedef T type; };
#define __MTL_REMOVE(space)                                                       \
  template <class T> struct remove_reference<space T &> { typedef T type; };      \
  template <class T> struct remove_pointer<space T *> { typedef T type; };        \
  template <class T> struct remove_addrspace<space T> { typedef T type; };        \
  template <class T> struct remove_addrspace<const space T> { typedef const T type; };
__MTL_REMOVE(device)
__MTL_REMOVE(threadgroup)
#undef __MTL_REMOVE
template <class T> struct remove_reference<constant T &> { typedef T type; };
template <class T> struct remove_pointer<constant T *> { typedef T type; };
template <class T> struct remove_addrspace<constant T> { typedef const T type; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;
template <class T> T declval() noexcept;

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class T> struct is_void : is_same<remove_cv_t<T>, void> {};
template <class T> struct is_vector : bool_constant<(__mtl::components<T>::n > 0)> {};
template <class A, class B> struct is_base_of : bool_constant<__is_base_of(A, B)> {};
template <class A, class B> struct is_constructible : bool_constant<__is_constructible(A, B)> {};
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <> struct is_convertible<float, bfloat> : false_type {};
template <> struct is_convertible<half, bfloat> : false_type {};
template <> struct is_convertible<bfloat, half> : false_type {};
#define __MTL_TRAIT(name) template <class T> struct name : bool_constant<__##name(T)> {};
__MTL_TRAIT(is_integral)
__MTL_TRAIT(is_floating_point)
__MTL_TRAIT(is_arithmetic)
__MTL_TRAIT(is_signed)
__MTL_TRAIT(is_unsigned)
__MTL_TRAIT(is_pointer)
__MTL_TRAIT(is_scalar)
#undef __MTL_TRAIT

template <class... B> struct conjunction : true_type {};
template <class B, class... R> struct conjunction<B, R...> : conditional_t<bool(B::value), conjunction<R...>, B> {};
template <class... B> struct disjunction : false_type {};
template <class B, class... R> struct disjunction<B, R...> : conditional_t<bool(B::value), B, disjunction<R...>> {};
template <class B> struct negation : bool_constant<!bool(B::value)> {};
template <class... B> using _disjunction = disjunction<B...>;
template <class... B> using _conjunction = conjunction<B...>;

#define __MTL_VALUE(name) template <class T> static constexpr constant bool name##_v = name<T>::value;
__MTL_VALUE(is_integral)
__MTL_VALUE(is_floating_point)
__MTL_VALUE(is_arithmetic)
__MTL_VALUE(is_signed)
__MTL_VALUE(is_unsigned)
__MTL_VALUE(is_pointer)
__MTL_VALUE(is_scalar)
__MTL_VALUE(is_void)
#undef __MTL_VALUE
template <class A, class B> static constexpr constant bool is_same_v = is_same<A, B>::value;
template <class A, class B> static constexpr constant bool is_convertible_v = is_convertible<A, B>::value;
template <class A, class B> static constexpr constant bool is_base_of_v = is_base_of<A, B>::value;

template <class T> struct make_unsigned;
template <class T> struct make_signed;
#define __MTL_SIGNS(s, u)                                  \
  template <> struct make_unsigned<s> { typedef u type; }; \
  template <> struct make_unsigned<u> { typedef u type; }; \
  template <> struct make_signed<s> { typedef s type; };   \
  template <> struct make_signed<u> { typedef s type; };
__MTL_SIGNS(signed char, uchar)
__MTL_SIGNS(short, ushort)
__MTL_SIGNS(int, uint)
__MTL_SIGNS(long, ulong)
#undef __MTL_SIGNS
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> using make_signed_t = typename make_signed<T>::type;

template <class T, size_t N> struct array {
  T __elements[N];
  constexpr T operator[](size_t i) const { return __elements[i]; }
  T &operator[](size_t i) { return __elements[i]; }
  static constexpr size_t size() { return N; }
};

template <class T> struct uniform {
  T __value;
  constexpr uniform(T v) : __value(v) {}
  constexpr operator T() const { return __value; }
};
template <class T> constexpr uniform<T> make_uniform(T v) { return uniform<T>(v); }
}  // namespace metal

template <class T, class F> __MTL_INLINE constexpr T as_type(F f) {
  static_assert(sizeof(T) == sizeof(F), "as_type: size mismatch");
  return __builtin_bit_cast(T, f);
}
