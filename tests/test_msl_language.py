"""What Metal's compiler refuses is refused, what it takes is taken.

The expectations follow the Metal shading language specification, the error texts in public issues of projects that
generate Metal, and the comments in MLX's own kernels. None of this was run through Apple's compiler.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.msl import SUPPORTED, MslError, metal_kernel
from tests.msl.lexer import Token, lex

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the Metal emulator runs on x86-64 Linux")

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741

# name: (statements, what the refusal says, header). The input is `inp`, 16 floats.
REFUSED = {
    # address spaces
    "device pointer as thread pointer": ("const thread float* q = inp; out[i] = q[i];", "cannot initialize|address"),
    "local pointer without space": ("float s[2] = {1, 2}; float* q = s; out[i] = q[0];", "without an address space"),
    "parameter pointer without space": (
        "float s[2] = {1, 2}; out[i] = f(s);",
        "header line 1: pointer or reference to 'float' without an address space",
        "inline float f(float* p) { return p[0]; }\n",
    ),
    "parameter reference without space": (
        "float s = 1; f(s); out[i] = s;",
        "without an address space",
        "inline void f(float& p) { p = 2; }\n",
    ),
    "device pointer for a thread parameter": (
        "out[i] = f(inp);",
        "no matching function",
        "inline float f(const thread float* p) { return p[0]; }\n",
    ),
    "threadgroup as device": (
        "threadgroup float b[32]; b[i] = inp[i]; const device float* q = b; out[i] = q[i];",
        "cannot initialize",
    ),
    "cast that drops the space": ("const thread float* q = (const thread float*)inp; out[i] = q[i];", "address-space"),
    "cast between spaces": (
        "const threadgroup float* q = (const threadgroup float*)inp; out[i] = q[i];",
        "source line 2: cast between address spaces",
    ),
    "reinterpret_cast between spaces": (
        "auto q = reinterpret_cast<const threadgroup float*>(inp); out[i] = q[i];",
        "reinterpret_cast",
    ),
    "store to an input": ("inp[i] = 1; out[i] = 0;", "read-only|const"),
    "threadgroup variable in a helper": (
        "out[i] = f(i);",
        "can only be declared in a kernel function",
        "inline float f(uint i) { threadgroup float b[4]; b[0] = 1; return b[0]; }\n",
    ),
    "threadgroup initialiser": ("threadgroup float b = 0; out[i] = b;", "cannot have an initialiser"),
    "threadgroup array of run-time size": ("threadgroup float b[inp_shape[0]]; b[i] = 1; out[i] = b[i];", "variable"),
    "method on a device struct": (
        "const device S* q = (const device S*)inp; out[i] = q[0].f();",
        "cannot initialize object parameter",
        "struct S { float a; float f() const { return a; } };\n",
    ),
    "thread reference from an unmarked method": (
        "S s; s.at() = 1; out[i] = s.a;",
        "must be marked `thread`",
        "struct S { float a; thread float& at() { return a; } };\n",
    ),
    # program scope
    "static local": ("static int c = 0; c++; out[i] = c;", "static local"),
    "program-scope variable": ("g = 1; out[i] = g;", "constant address space", "float g;\n"),
    "program-scope constexpr": ("out[i] = N;", "constant address space", "constexpr int N = 4;\n"),
    "program-scope const": ("out[i] = N;", "constant address space", "const float N = 4;\n"),
    "static member": (
        "out[i] = S<float>::n;",
        "constant address space",
        "template <typename T> struct S { static constexpr int n = sizeof(T); };\n",
    ),
    "variable template": (
        "out[i] = n<float>;",
        "constant address space",
        "template <typename T> constexpr int n = sizeof(T);\n",
    ),
    # types and conversions
    "double variable": ("double d = inp[i]; out[i] = (float)d;", "double precision"),
    "long double literal": ("out[i] = inp[i] * 1.5L;", "long double"),
    "long long": ("long long d = 3; out[i] = (float)d;", "long long"),
    "128-bit integer": ("__int128 d = 3; out[i] = (float)d;", "128-bit"),
    "float to bfloat": ("bfloat b = inp[i]; out[i] = float(b);", "implicit conversion"),
    "float assigned to bfloat": ("bfloat b; b = inp[i]; out[i] = float(b);", "implicit conversion"),
    "float literal to bfloat": ("bfloat b = 1.5f; out[i] = float(b);", "no implicit conversion from float to bfloat"),
    "half to bfloat": ("half h = 1.0h; bfloat b = h; out[i] = float(b);", "cannot initialize"),
    "bfloat to half": ("bfloat b = bfloat(1.0f); half h = b; out[i] = h;", "cannot initialize"),
    "half plus bfloat": ("bfloat b = bfloat(1.0f); half h = 1.0h; out[i] = float(b + h);", "conver|invalid operands"),
    "bfloat += float": ("bfloat b = 1.5bf; b += inp[i]; out[i] = float(b);", "implicit conversion"),
    "half4 from float4": ("half4 h = float4(1); out[i] = h.x;", "cannot initialize|cannot convert"),
    "int4 from float4": ("int4 h = float4(1); out[i] = h.x;", "cannot initialize|cannot convert"),
    "vector of the wrong size": ("float4 h = float4(float2(1, 2), 3); out[i] = h.x;", "wrong number of components"),
    "narrowing in braces": ("int a{inp[i]}; out[i] = a;", "cannot be narrowed"),
    "as_type of another size": ("out[i] = as_type<float>((ushort)3);", "size mismatch"),
    "vector condition": (
        "float2 a = float2(inp[i]); float2 b = (a > float2(0)) ? a : -a; out[i] = b.x;",
        "source line 2: .*vector condition",
    ),
    "pointer from integer": ("const device float* q = 7; out[i] = 0;", "cannot initialize"),
    # overloads exist per exact type
    "min of int and uint": ("int a = 3; out[i] = min(a, i);", "ambiguous"),
    "min of half and float": ("half a = 3; out[i] = min(a, inp[i]);", "ambiguous"),
    "max of float and int": ("out[i] = max(inp[i], 0);", "ambiguous"),
    "exp of int": ("int a = 3; out[i] = exp(a);", "ambiguous"),
    "simd_sum of long": ("long a = 3; out[i] = (float)simd_sum(a);", "ambiguous"),
    # what Metal has not
    "recursion": (
        "out[i] = f((int)i);",
        "recursive",
        "inline float f(int n) { return n <= 0 ? 1.0f : f(n - 1) * 2.0f; }\n",
    ),
    "function pointer": (
        "thread float (*const f)(float) = g; out[i] = h(f, inp[i]);",
        "through a pointer|cannot initialize|no matching",
        "inline float g(float x) { return x; }\ntemplate <typename F> inline float h(F f, float x) { return f(x); }\n",
    ),
    "goto": ("out[i] = 0; goto end; end: ;", "goto"),
    "array of run-time size": ("int n = (int)i + 1; float a[n]; a[0] = 1; out[i] = a[0];", "variable length array"),
    "throw": ("if (i > 1000) throw 3; out[i] = 0;", "exceptions"),
    "new": ("thread int* q = new int; out[i] = *q;", "operator new"),
    "virtual": ("S s; out[i] = s.f();", "virtual", "struct S { virtual float f() { return 1; } };\n"),
    "dynamic_cast": (
        "S s; thread S* q = dynamic_cast<thread S*>(&s); out[i] = 1;",
        "dynamic_cast",
        "struct S { float f() { return 1; } };\n",
    ),
    "libm name": ("out[i] = expf(inp[i]);", "undeclared"),
    "std": ("out[i] = std::exp(inp[i]);", "C\\+\\+ standard library"),
    "printf": ('printf("x"); out[i] = 0;', "undeclared"),
    "erf": ("out[i] = metal::erf(inp[i]);", "no member named 'erf'"),
    "C++ header": ("out[i] = 0;", "Metal's own headers", "#include <cmath>\n"),
    "integer simdgroup_matrix": (
        "simdgroup_matrix<int, 8, 8> m; out[i] = 0;",
        "must be half, bfloat or float",
        "#include <metal_simdgroup_matrix>\n",
    ),
    "simdgroup_matrix of another size": ("simdgroup_matrix<float, 16, 16> m; out[i] = 0;", "only 8x8"),
    "reserved word": ("float vertex = 1; out[i] = vertex;", "reserved word"),
    "kernel as a name": ("float kernel = 1; out[i] = kernel;", "reserved word"),
    "attribute declared again": ("uint thread_position_in_grid = 3; out[thread_position_in_grid] = 1;", "redefinition"),
    "attribute named only in a comment": ("out[i] = 0; // not threads_per_grid", "stands only in a comment"),
    "function of MLX's preamble": (
        "out[i] = ceildiv(3, 2);",
        "redefinition",
        "template <typename T, typename U> inline T ceildiv(T a, U b) { return (a + b - 1) / b; }\n",
    ),
    "function named like a type of Metal's": (
        "out[i] = decay(inp[i]);",
        "header line 1: 'decay' is also a name of Metal's library",
        "inline float decay(float x) { return x / 2; }\n",
    ),
    "type named like one of Metal's": (
        "level x; x.at = 1; out[i] = x.at;",
        "'level' is also",
        "struct level { int at; };\n",
    ),
    "constant named like a type of Metal's": ("out[i] = rank;", "'rank' is also", "constant constexpr int rank = 3;\n"),
    "seq_cst": (
        "threadgroup atomic_int a; atomic_store_explicit(&a, 1, memory_order_seq_cst); out[i] = 1;",
        "undeclared",
    ),
    "float atomic in threadgroup memory": (
        "threadgroup atomic_float a; atomic_fetch_add_explicit(&a, 1.0f, memory_order_relaxed); out[i] = 0;",
        "no matching function",
    ),
    "plain store to an atomic": ("threadgroup atomic_int a; a = 3; out[i] = 0;", "no viable|address"),
    "barrier without flags": ("threadgroup_barrier(); out[i] = 0;", "no matching function"),
}

# Refused or taken depending on the language version: statements, refused by, taken by, header.
VERSIONED = {
    "lambda": ("auto f = [&](float x) { return x * 2; }; out[i] = f(inp[i]);", 310, 320, ""),
    "class template argument deduction": (
        "Wrap s{1.0f}; out[i] = s.a;",
        320,
        400,
        "template <typename T> struct Wrap { T a; Wrap(T x) : a(x) {} };\n",
    ),
}

# name: (statements, header)
TAKEN = {
    "thread parameter": ("float s[2] = {1, 2}; out[i] = f(s);", "inline float f(thread float* p) { return p[0]; }\n"),
    "library names of parameters, members and variables": (
        "float decay = 2; out[i] = f(inp[i], decay);",
        "struct Pair { float level; };\n"
        "template <typename P> inline vec<float, 2> pair_of(P bias) { return vec<float, 2>(bias, bias); }\n"
        "inline float f(float component, float depth) { Pair rank = {depth}; return component * rank.level; }\n",
    ),
    "template over the space": (
        "threadgroup float b[32]; b[i] = inp[i]; out[i] = f(b, i) + f(inp, i);",
        "template <typename P> inline float f(P p, uint i) { return p[i]; }\n",
    ),
    "overload on the space": (
        "threadgroup float b[32]; b[i] = inp[i]; out[i] = f(b, i) + f(inp, i);",
        "inline float f(const device float* p, uint i) { return p[i]; }\n"
        "inline float f(const threadgroup float* p, uint i) { return p[i]; }\n",
    ),
    "threadgroup variable in a block": ("if (i < 100) { threadgroup float b[32]; b[i] = 1; out[i] = b[i]; }",),
    "two threadgroup variables": (
        "threadgroup float b[32], c[2][32]; b[i] = c[1][i] = inp[i]; out[i] = b[i] + c[1][i];",
    ),
    "zeroed threadgroup variable": ("threadgroup int b[32] = {0}; out[i] = b[i];",),
    "array parameter": (
        "threadgroup float b[32]; b[i] = inp[i]; out[i] = f(b, i);",
        "inline float f(threadgroup float b[32], uint i) { return b[i]; }\n",
    ),
    "deduced reference": ("threadgroup float b[32]; auto& r = b[i]; r = 1; out[i] = b[i];",),
    "variable set in a loop": ("float s; for (int k = 0; k < 4; ++k) s = inp[k]; out[i] = s;",),
    "unsuffixed literal": ("out[i] = inp[i] * 1.5;",),
    "max with a literal": ("out[i] = max(inp[i], 0.0);",),
    "inheritance": ("D d; out[i] = d.x;", "struct B { float x = 1; }; struct D : B {};\n"),
    "program-scope constant": (
        "out[i] = N + M[i & 1];",
        "constant constexpr int N = 4;\nconstant float M[2] = {1, 2};\n",
    ),
    "static constant member": (
        "out[i] = S<float>::n;",
        "template <typename T> struct S { static constexpr constant int n = sizeof(T); };\n",
    ),
    "local constexpr": ("constexpr int N = 4; float a[N] = {1, 2, 3, 4}; out[i] = a[i & 3];",),
    "select": ("float2 a = float2(inp[i]); float2 b = select(-a, a, a > float2(0.0f)); out[i] = b.x;",),
    "explicit bfloat": ("bfloat b = bfloat(inp[i]); out[i] = float(b);",),
    "bfloat literal": ("bfloat b = 1.5bf; out[i] = float(b);",),
    "half from float": ("half h = inp[i]; out[i] = h;",),
    "half4 of float4": ("half4 h = half4(float4(1)); out[i] = h.x;",),
    "vector constructors": (
        "float2 a = float2(1, 2); float4 b = float4(a, 3, 4); float3 c = b.xyz; out[i] = c.z + vec<float, 4>(a, a).w;",
    ),
    "swizzle store": ("float4 b = 0; b.xz = float2(1, 2); out[i] = b.z;",),
    "braces": ("float4 b = {1, 2, 3, 4}; out[i] = b.w;",),
    "structured binding": ("S s{1, 2}; auto [a, b] = s; out[i] = a + b;", "struct S { float a, b; };\n"),
    "if constexpr": ("if constexpr (sizeof(float) == 4) out[i] = 1; else out[i] = 2;",),
    "struct member in device memory": (
        "const device S* q = (const device S*)inp; out[i] = q[i / 2].a;",
        "struct S { float a, b; };\n",
    ),
    "reference to threadgroup memory": ("threadgroup float b[32]; threadgroup auto& r = b[i]; r = 1; out[i] = b[i];",),
    "hexadecimal float": ("out[i] = 0x1p3f + 1.f + 1e3f;",),
    "unrolled loop": (
        "float s = 0;\n#pragma clang loop unroll(full)\nfor (int k = 0; k < 4; ++k) s += inp[k]; out[i] = s;",
    ),
    "method marked thread": (
        "S<float> s; s.set(2); out[i] = s.at();",
        "template <typename T> struct S {\n"
        "T v;\nvoid set(T x) thread { v = x; }\nthread T& at() thread { return v; }\n};\n",
    ),
    "overloads and defaults": (
        "out[i] = f(1.0f) + f(1);",
        "inline float f(float x, int k = 2) { return x * k; }\ninline float f(int x) { return x; }\n",
    ),
    "reference to an array": (
        "float a[4] = {1, 2, 3, 4}; out[i] = g<4>(a);",
        "template <int N> inline float g(thread float (&a)[N]) { return a[N - 1]; }\n",
    ),
    "union": ("union { float f; uint u; } x; x.f = inp[i]; out[i] = (float)x.u;",),
    "bit field": ("S s; s.a = 1; out[i] = s.a;", "struct S { uint a : 4; uint b : 28; };\n"),
    "nested subscript": ("constexpr int n[2] = {1, 0}; out[i] = inp[n[i & 1]];",),
    "control flow": (
        "int k = 0; do { k++; } while (k < 3); switch (k) { case 3: out[i] = 1; break; default: out[i] = 2; }",
    ),
}


def run(source: str, header: str = "", *, metal: int = 320, inputs: int = 1) -> None:
    kernel = metal_kernel(
        "probe", ["inp", *(f"z{k}" for k in range(1, inputs))], ["out"], I + source, header, metal=metal
    )
    x = np.arange(16, dtype=np.float32)
    kernel(
        inputs=[x] * inputs,
        grid=(16, 1, 1),
        threadgroup=(16, 1, 1),
        output_shapes=[(16,)],
        output_dtypes=[np.float32],
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    source, message, *header = REFUSED[name]
    with pytest.raises(MslError, match=re.compile(message, re.S)):
        run(source, *header)


@pytest.mark.parametrize("name", VERSIONED)
def test_depends_on_the_language_version(name: str) -> None:
    source, refused, taken, header = VERSIONED[name]
    run(source, header, metal=taken)
    with pytest.raises(MslError):
        run(source, header, metal=refused)


@pytest.mark.parametrize("metal", [310, 410])
def test_taken(metal: int) -> None:
    """All in one kernel, each in a scope of its own: compiling is what costs."""
    bodies, headers = [], []
    for n, (source, *header) in enumerate(TAKEN.values()):
        if header:  # the helpers of one probe must not meet those of another
            source, header = (re.sub(r"\b([fgSBD])\b", rf"\1_{n}", text) for text in (source, header[0]))
            headers.append(header)
        bodies.append(f"{{\n{source}\n}}\n")
    run("".join(bodies), "".join(headers), metal=metal)


def test_too_many_buffers() -> None:
    run("out[i] = 0;", inputs=30)
    with pytest.raises(MslError, match="32 buffer arguments; Metal allows 31"):
        run("out[i] = 0;", inputs=31)


@given(st.text("ab1. \t\n\\\"'/*<>[](){};:#=-+&|"))
def test_tokens_join_to_the_source(source: str) -> None:
    tokens = lex(source)
    assert "".join(token.text for token in tokens) == source
    assert all(token.line == 1 + source.count("\n", 0, at) for token, at in zip(tokens, offsets(tokens), strict=True))


def offsets(tokens: list[Token]) -> list[int]:
    return [sum(len(token.text) for token in tokens[:i]) for i in range(len(tokens))]
