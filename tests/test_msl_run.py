"""Kernels run by the emulator compute what Metal defines: types, memory, SIMD-groups, matrices, schedules, counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from tests import msl
from tests.msl import SUPPORTED, CompileError, MslError, RunError, install, last_report, metal_kernel

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the Metal emulator runs on x86-64 Linux")

Array = np.ndarray[Any, Any]
I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741


def elementwise(source: str, *inputs: Any, dtype: Any = np.float32, size: int = 0, **options: Any) -> Any:
    """One thread per element of the output; inputs are called a, b, c."""
    size = size or inputs[0].size
    template, init_value = options.pop("template", None), options.pop("init_value", None)
    kernel = metal_kernel("elementwise", list("abc")[: len(inputs)], ["out"], I + source, **options)
    return kernel(
        inputs=list(inputs),
        template=template,
        grid=(size, 1, 1),
        threadgroup=(min(size, 64), 1, 1),
        output_shapes=[(size,)],
        output_dtypes=[dtype],
        init_value=init_value,
    )[0]


# ---------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.uint16, mx.int32, mx.uint32, mx.int64]
)
def test_every_dtype_passes_through(dtype: mx.Dtype) -> None:
    x = (mx.arange(20) * 5 - 30).astype(dtype)
    y = elementwise("out[i] = a[i];", x, dtype=dtype)
    assert y.dtype == dtype
    assert mx.array_equal(x, y)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_float_to_half_rounds_to_nearest_even(dtype: mx.Dtype) -> None:
    x = mx.concatenate([mx.random.normal((500,)), mx.array([0.0, -0.0, 1e-8, 6e4, 1e30, float("inf"), float("nan")])])
    y = elementwise("out[i] = static_cast<T>(a[i]);", x, dtype=dtype, template=[("T", dtype)])
    assert mx.array_equal(y, x.astype(dtype), equal_nan=True)


def test_half_arithmetic_rounds_every_operation() -> None:
    a, b, c = (np.random.default_rng(s).normal(size=300).astype(np.float16) for s in range(3))
    y = elementwise("out[i] = a[i] * b[i] + c[i];", a, b, c, dtype=np.float16)
    np.testing.assert_array_equal(y, a * b + c)


def test_bfloat_arithmetic_rounds_every_operation() -> None:
    a, b, c = (mx.random.normal((300,), key=mx.random.key(s)).astype(mx.bfloat16) for s in range(3))
    y = elementwise("out[i] = a[i] * b[i] + c[i];", a, b, c, dtype=mx.bfloat16)
    product = (a.astype(mx.float32) * b.astype(mx.float32)).astype(mx.bfloat16)
    expected = (product.astype(mx.float32) + c.astype(mx.float32)).astype(mx.bfloat16)
    assert mx.array_equal(y, expected)


def test_unsuffixed_literals_are_float() -> None:
    x = np.float32([0.1, 0.2, 0.3])
    np.testing.assert_array_equal(elementwise("out[i] = a[i] * 0.1 + 1e-3;", x), x * np.float32(0.1) + np.float32(1e-3))


def test_math_functions_in_all_spellings() -> None:
    names = ["exp", "exp2", "log", "log2", "sin", "cos", "tanh", "sqrt", "rsqrt", "abs", "floor"]
    calls = [f"{prefix}{name}(a[i])" for prefix in ("metal::", "fast::", "precise::") for name in names]
    x = np.linspace(0.1, 5, 64, dtype=np.float32)
    exact = [(lambda v: 1 / np.sqrt(v)) if name == "rsqrt" else getattr(np, name) for name in names]

    def run(calls: list[str], x: Array) -> Array:
        source = I + "".join(f"out[{n} * 64 + i] = {call};\n" for n, call in enumerate(calls))
        kernel = metal_kernel("math", ["a"], ["out"], source)
        shape = (len(calls), 64)
        return kernel(
            inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[shape], output_dtypes=[x.dtype]
        )[0]

    for y, function in zip(run(calls, x), exact * 3, strict=True):
        np.testing.assert_allclose(y, function(x.astype(np.float64)), rtol=1e-6)
    x = x.astype(np.float16)
    for y, function in zip(run(calls[: len(names)], x), exact, strict=True):
        np.testing.assert_allclose(y, function(x.astype(np.float64)), rtol=1e-3)


def test_vector_types() -> None:
    source = """
    float4 v = *(const device float4*)(a + 4 * (i / 4));
    float4 w(v.wzyx);
    v.xz = float2(v.y, 10.0f);
    half4 h = half4(v);
    float3 u = cross(v.xyz, w.xyz);
    vec<float, 2> s = vec<float, 2>(u.z, dot(v, w));
    out[i] = (i % 4 == 0 ? v.x : i % 4 == 1 ? float(h.z) : i % 4 == 2 ? s.y : u.x) + select(0.0f, 1.0f, any(v > w));
    """
    x = np.arange(8, dtype=np.float32)
    y = elementwise(source, x)
    for k in range(2):
        v = x[4 * k : 4 * k + 4].copy()
        w = v[::-1].copy()
        v[0], v[2] = v[1], 10
        u = np.cross(v[:3], w[:3])
        expected = np.array([v[0], v[2], v @ w, u[0]]) + float((v > w).any())
        np.testing.assert_allclose(y[4 * k : 4 * k + 4], expected)


def test_integer_functions() -> None:
    x = np.array([0, 1, 2, 255, 1 << 31, 0xF0F0F0F0, 7, 9], np.uint32)
    y = elementwise("out[i] = popcount(a[i]) + 100 * clz(a[i]) + 10000 * ctz(a[i]);", x, dtype=np.uint32)
    bits = [f"{v:032b}" for v in x]
    expected = [b.count("1") + 100 * len(b.split("1")[0]) + 10000 * len(b.split("1")[-1]) for b in bits]
    np.testing.assert_array_equal(y, expected)


# --------------------------------------------------------------------------------------------------------- memory

VIEWS = {
    "slice": lambda x: x[:, 1:4],
    "step": lambda x: x[::2, ::3],
    "transpose": lambda x: x.T,
    "reversed": lambda x: x[::-1, ::-2],
    "broadcast": lambda x: mx.broadcast_to(x[1], (3, 6)),
    "overlapping": lambda x: mx.as_strided(x, (4, 5), (3, 2), 1),
    "tail": lambda x: x[2:],
}
BY_STRIDES = "out[i] = a[elem_to_loc<int64_t>(i, a_shape, a_strides, a_ndim)];"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_strides_of_mlx_views_are_real(view: str, dtype: mx.Dtype) -> None:
    x = VIEWS[view](mx.arange(36).reshape(6, 6).astype(dtype))
    y = elementwise(BY_STRIDES, x, dtype=dtype, ensure_row_contiguous=False)
    assert mx.array_equal(y, x.reshape(-1))


def test_numpy_views_are_real_too() -> None:
    x = np.arange(36, dtype=np.float16).reshape(6, 6)[1::2, ::-1]
    np.testing.assert_array_equal(elementwise(BY_STRIDES, x, dtype=np.float16, ensure_row_contiguous=False), x.ravel())


def test_ignoring_strides_is_found() -> None:
    x = mx.arange(36).reshape(6, 6).astype(mx.float32)[:, :3]
    with pytest.raises(RunError, match="source line 2:.*between the elements of the strided input 'a': offset 3"):
        elementwise("out[i] = a[i];", x, dtype=mx.float32, ensure_row_contiguous=False)


def test_row_contiguous_copies() -> None:
    x = mx.arange(36).reshape(6, 6).astype(mx.float32).T
    assert mx.array_equal(elementwise("out[i] = a[i] + a_strides[0];", x, dtype=mx.float32), x.reshape(-1) + 6)


def test_small_inputs_are_in_constant_space() -> None:
    source = "const device float* p = a; out[i] = p[i];"
    np.testing.assert_array_equal(elementwise(source, np.ones(8, np.float32)), np.ones(8))
    with pytest.raises(CompileError, match="source line 2:"):
        elementwise(source, np.ones(7, np.float32))


def test_python_scalars_are_references() -> None:
    np.testing.assert_array_equal(elementwise("out[i] = a + b + (c ? 1 : 0);", 2, 0.5, True, size=3), [3.5] * 3)


def test_outputs_start_at_init_value() -> None:
    for dtype in (mx.float32, mx.bfloat16, mx.int32):
        y = elementwise(
            "if (i % 2) out[i] = T(float(out[i]) + 1);", mx.zeros(9), dtype=dtype, init_value=3, template=[("T", dtype)]
        )
        assert mx.array_equal(y, mx.array([3, 4] * 4 + [3]).astype(dtype))


def test_empty_grid_writes_nothing() -> None:
    kernel = metal_kernel("empty", ["a"], ["out"], I + "out[i] = a[i];")
    out = kernel(
        inputs=[mx.zeros((0, 4))],
        grid=(0, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(0, 4)],
        output_dtypes=[mx.float32],
    )[0]
    assert out.shape == (0, 4)


def test_the_last_threadgroups_of_a_grid_larger_than_memory() -> None:
    rows, width = 2**23, 1024
    kernel = metal_kernel(
        "far",
        ["x"],
        ["out"],
        """
        uint3 p = thread_position_in_grid;
        out[size_t(p.y) * 1024 + p.x] = x[size_t(p.y) * x_strides[0] + p.x * x_strides[1]] + 1;
        """,
        ensure_row_contiguous=False,
    )
    (out,) = kernel(
        inputs=[np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))],
        output_shapes=[(rows, width)],
        output_dtypes=[np.int32],
        grid=(width, rows, 1),
        threadgroup=(64, 1, 1),
        last=width // 64 + 1,
    )
    np.testing.assert_array_equal(out[-1], np.arange(width) + 1)
    np.testing.assert_array_equal(out[-2], np.where(np.arange(width) < width - 64, 0, out[-1]))
    assert last_report().buffers["out"].unique_stored == (width + 64) * 4
    assert last_report().buffers["x"].unique_loaded == width * 4


def test_element_aligned_buffers_expose_vector_loads() -> None:
    source = "float4 v = *(const device float4*)(a + i / 4 * 4); out[i] = v[i % 4];"
    x = np.arange(16, dtype=np.float32)
    np.testing.assert_array_equal(elementwise(source, x), x)
    with pytest.raises(RunError, match="misaligned 16-byte load"):
        elementwise(source, np.arange(17, dtype=np.float32), size=16, align=4)


# ---------------------------------------------------------------------------------------------------- SIMD-groups

LANES = np.arange(32)
SHUFFLES = {
    "simd_shuffle(x, ushort(31 - lane))": 31 - LANES,
    "simd_shuffle_xor(x, ushort(5))": LANES ^ 5,
    "simd_shuffle_up(x, ushort(3))": np.where(LANES < 3, LANES, LANES - 3),
    "simd_shuffle_down(x, ushort(3))": np.where(LANES > 28, LANES, LANES + 3),
    "simd_shuffle_rotate_up(x, ushort(3))": (LANES - 3) % 32,
    "simd_shuffle_rotate_down(x, ushort(3))": (LANES + 3) % 32,
    "simd_broadcast(x, ushort(9))": LANES * 0 + 9,
    "simd_broadcast_first(x)": LANES * 0,
    "quad_shuffle_xor(x, ushort(1))": LANES ^ 1,
    "quad_broadcast(x, ushort(2))": LANES // 4 * 4 + 2,
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_shuffles(dtype: mx.Dtype) -> None:
    x = mx.random.normal((32,)).astype(dtype)
    picks = [e for e in SHUFFLES if not (dtype == mx.bfloat16 and e.startswith(("quad", "simd_broadcast_first")))]
    body = "uint lane = thread_index_in_simdgroup; T x = a[i];\n"
    body += "".join(f"out[{n} * 32 + i] = {expression};\n" for n, expression in enumerate(picks))
    kernel = metal_kernel("shuffles", ["a"], ["out"], I + body)
    y = kernel(
        inputs=[x],
        template=[("T", dtype)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(len(picks), 32)],
        output_dtypes=[dtype],
    )[0]
    for row, expression in zip(y, picks, strict=True):
        assert mx.array_equal(row, x[mx.array(SHUFFLES[expression])]), expression


def test_reductions_scans_and_votes() -> None:
    x = np.random.default_rng(0).integers(1, 5, 64).astype(np.int32)
    source = """int x = a[i];
    out[i] = simd_sum(x); out[64 + i] = simd_max(x); out[128 + i] = simd_min(x); out[192 + i] = simd_xor(x);
    out[256 + i] = simd_prefix_inclusive_sum(x); out[320 + i] = simd_prefix_exclusive_sum(x);
    out[384 + i] = quad_sum(x); out[448 + i] = popcount(uint(ulong(simd_ballot(x > 2))));
    out[512 + i] = simd_all(x > 0);
    """
    kernel = metal_kernel("reductions", ["a"], ["out"], I + source)
    y = kernel(
        inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(9, 2, 32)], output_dtypes=[np.int32]
    )[0]
    g = x.reshape(2, 32)
    per_group = [g.sum(1), g.max(1), g.min(1), np.bitwise_xor.reduce(g, 1)]
    for got, expected in zip(y, per_group, strict=False):
        np.testing.assert_array_equal(got, np.repeat(expected[:, None], 32, 1))
    np.testing.assert_array_equal(y[4], g.cumsum(1))
    np.testing.assert_array_equal(y[5], g.cumsum(1) - g)
    np.testing.assert_array_equal(y[6], np.repeat(g.reshape(2, 8, 4).sum(2), 4, 1))
    np.testing.assert_array_equal(y[7], np.repeat((g > 2).sum(1)[:, None], 32, 1))
    assert (y[8] == 1).all()


def test_simd_sum_adds_in_butterfly_order() -> None:
    x = np.random.default_rng(1).normal(size=32).astype(np.float32)
    y = elementwise("out[i] = simd_sum(a[i]);", x)
    v = x.copy()
    for distance in (1, 2, 4, 8, 16):
        v = v + v[LANES ^ distance]
    np.testing.assert_array_equal(y, v)


def test_partial_simdgroup_of_an_edge_threadgroup() -> None:
    x = np.ones(100, np.float32)
    y = elementwise("out[i] = simd_sum(a[i]);", x)  # threadgroups of 64 and 36 threads
    np.testing.assert_array_equal(y, [32] * 96 + [4] * 4)


ROW_SUM = """
    threadgroup float part[32];
    uint row = threadgroup_position_in_grid.x, tid = thread_index_in_threadgroup;
    float sum = 0;
    for (uint k = tid; k < (uint)a_shape[1]; k += threads_per_threadgroup.x)
        sum += static_cast<float>(a[row * a_shape[1] + k]);
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_index_in_threadgroup == 0) {
        sum = thread_index_in_simdgroup < simdgroups_per_threadgroup ? part[thread_index_in_simdgroup] : 0.0f;
        sum = simd_sum(sum);
        if (tid == 0) out[row] = sum;
    }
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_two_level_reduction_under_every_schedule(dtype: mx.Dtype) -> None:
    x = mx.random.normal((5, 300)).astype(dtype)
    kernel = metal_kernel("row_sum", ["a"], ["out"], ROW_SUM)
    results = [
        kernel(
            inputs=[x],
            grid=(5 * 128, 1, 1),
            threadgroup=(128, 1, 1),
            output_shapes=[(5,)],
            output_dtypes=[mx.float32],
            order=order,
        )[0]
        for order in range(8)
    ]
    assert all(mx.array_equal(result, results[0]) for result in results)
    np.testing.assert_allclose(results[0], np.array(x.astype(mx.float32), np.float64).sum(1), rtol=1e-5, atol=1e-5)


MATMUL = """
    constexpr int TILE = 16;
    threadgroup T As[TILE][TILE + 4];
    threadgroup T Bs[TILE][TILE + 4];
    const int M = a_shape[0], K = a_shape[1], N = b_shape[1];
    const int m0 = threadgroup_position_in_grid.y * TILE, n0 = threadgroup_position_in_grid.x * TILE;
    const uint sg = simdgroup_index_in_threadgroup, tid = thread_index_in_threadgroup;
    const int row = (sg / 2) * 8, column = (sg % 2) * 8;
    auto acc = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int k0 = 0; k0 < K; k0 += TILE) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int e = tid; e < TILE * TILE; e += 128) {
            int r = e / TILE, c = e % TILE;
            As[r][c] = m0 + r < M && k0 + c < K ? a[(m0 + r) * K + k0 + c] : T(0);
            Bs[r][c] = k0 + r < K && n0 + c < N ? b[(k0 + r) * N + n0 + c] : T(0);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < TILE; k += 8) {
            simdgroup_matrix<T, 8, 8> x, y;
            simdgroup_load(x, &As[row][k], TILE + 4);
            simdgroup_load(y, &Bs[k][column], TILE + 4);
            simdgroup_multiply_accumulate(acc, x, y, acc);
        }
    }
    const uint lane = thread_index_in_simdgroup, quad = lane / 4;
    const int r = m0 + row + (quad & 4) + (lane / 2) % 4, c = n0 + column + (quad & 2) * 2 + (lane % 2) * 2;
    for (int j = 0; j < 2; ++j)
        if (r < M && c + j < N) out[r * N + c + j] = static_cast<T>(acc.thread_elements()[j]);
"""


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-6), (mx.float16, 1e-3), (mx.bfloat16, 8e-3)])
def test_simdgroup_matrices(dtype: mx.Dtype, tolerance: float) -> None:
    m, k, n = 40, 50, 20
    a = mx.random.normal((m, k)).astype(dtype)
    b = mx.random.normal((k, n)).astype(dtype)
    kernel = metal_kernel("matmul", ["a", "b"], ["out"], MATMUL, "#include <metal_simdgroup_matrix>\n")
    y = kernel(
        inputs=[a, b],
        template=[("T", dtype)],
        grid=(2 * 128, 3, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(m, n)],
        output_dtypes=[dtype],
    )[0]
    a64, b64 = (np.array(x.astype(mx.float32), np.float64) for x in (a, b))
    error = np.abs(np.array(y.astype(mx.float32), np.float64) - a64 @ b64) / (np.abs(a64) @ np.abs(b64))
    assert error.max() < tolerance
    # 6 threadgroups x 4 SIMD-groups x 4 steps of 16 x 2 products; two arrays of 16 x 20 elements
    assert last_report().matrix_products == 6 * 4 * 4 * 2
    assert last_report().threadgroup_bytes == 2 * 16 * 20 * dtype.size


def test_matrix_store_and_diagonal() -> None:
    source = """
    simdgroup_matrix<float, 8, 8> m, d(2.0f), p;
    simdgroup_load(m, a, 8, ulong2(0, 0), true);
    simdgroup_multiply(p, m, d);
    simdgroup_store(p, out, 8);
    """
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    kernel = metal_kernel("transpose", ["a"], ["out"], source, "#include <metal_simdgroup_matrix>\n")
    y = kernel(inputs=[x], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(8, 8)], output_dtypes=[np.float32])[
        0
    ]
    np.testing.assert_array_equal(y, 2 * x.T)


# -------------------------------------------------------------------------------------------------------- atomics


def test_atomics_in_both_memories() -> None:
    source = """
    threadgroup atomic_int count;
    if (thread_index_in_threadgroup == 0) atomic_store_explicit(&count, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&count, a[i], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index_in_threadgroup == 0)
        atomic_fetch_add_explicit(&out[0], atomic_load_explicit(&count, memory_order_relaxed), memory_order_relaxed);
    atomic_fetch_max_explicit(&out[1], a[i], memory_order_relaxed);
    """
    x = np.random.default_rng(0).integers(0, 50, 200).astype(np.int32)
    kernel = metal_kernel("atomics", ["a"], ["out"], I + source, atomic_outputs=True)
    y = kernel(
        inputs=[x],
        grid=(200, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(2,)],
        output_dtypes=[np.int32],
        init_value=0,
    )[0]
    np.testing.assert_array_equal(y, [x.sum(), x.max()])
    assert last_report().atomics == 200 + 200 + 4 + 4 + 4


# ------------------------------------------------------------------------------------------------------ schedules


def test_schedules_differ_and_repeat() -> None:
    """A kernel whose result depends on who comes first: each order gives its own result, always the same."""
    source = "out[i] = a[i] + atomic_fetch_add_explicit((device atomic_uint*)&ticket[0], 1u, memory_order_relaxed);"
    kernel = metal_kernel("ticket", ["a"], ["out", "ticket"], I + source)

    def run(order: int) -> tuple[int, ...]:
        out, _ = kernel(
            inputs=[np.zeros(128, np.uint32)],
            grid=(128, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(128,), (1,)],
            output_dtypes=[np.uint32] * 2,
            init_value=0,
            order=order,
        )
        return tuple(out.tolist())

    first = [run(order) for order in range(8)]
    assert len(set(first)) == 8
    assert first == [run(order) for order in range(8)]
    assert all(sorted(result) == list(range(128)) for result in first)


# ------------------------------------------------------------------------------------------------------- counters


def test_counters_of_a_known_kernel() -> None:
    source = """
    threadgroup float b[32];
    b[thread_index_in_threadgroup] = a[i] * 2.0f + 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = simd_sum(b[31 - thread_index_in_threadgroup]) + exp(a[0]);
    """
    kernel = metal_kernel("counted", ["a"], ["out"], I + source)
    kernel(
        inputs=[np.zeros(96, np.float32)],
        grid=(96, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(96,)],
        output_dtypes=[np.float32],
    )
    report = last_report()
    assert (report.threads, report.threadgroups, report.threadgroup_bytes) == (96, 3, 128)
    assert (report.simd_ops, report.barriers, report.matrix_products, report.atomics) == (3, 3, 0, 0)
    assert report.flops == 96 * 3  # a multiplication, an addition, the addition of exp
    assert report.specials == 96
    assert report.accesses("device") == 2 * 96
    assert report.accesses("device", stores=True) == 96
    assert report.accesses("threadgroup") == report.accesses("threadgroup", stores=True) == 96
    assert report.buffers["a"].loaded == 2 * 96 * 4
    assert report.buffers["a"].unique_loaded == 96 * 4
    assert report.buffers["out"].stored == report.buffers["out"].unique_stored == 96 * 4
    assert report.issued_bytes == 3 * 96 * 4
    assert report.unique_bytes == 2 * 96 * 4
    assert {(site.part, site.line) for site in report.sites} == {("source", 4), ("source", 6)}


# ------------------------------------------------------------------------------------------------- the call itself


def test_limits_and_wrong_calls() -> None:
    kernel = metal_kernel("copy", ["a"], ["out"], I + "out[i] = a[i];")
    call: dict[str, Any] = {"output_shapes": [(9,)], "output_dtypes": [np.float32]}
    x = np.ones(2048, np.float32)
    with pytest.raises(ValueError, match=r"Thread group size \(2048\) is greater than"):
        kernel(inputs=[x], grid=(2048, 1, 1), threadgroup=(2048, 1, 1), **call)
    with pytest.raises(ValueError, match=r"Thread group size \(512\) is greater than"):
        kernel(inputs=[x], grid=(2048, 1, 1), threadgroup=(512, 1, 1), max_threads=256, **call)
    with pytest.raises(ValueError, match="Expected `inputs` to have size 1 but got size 2"):
        kernel(inputs=[x, x], grid=(1, 1, 1), threadgroup=(1, 1, 1), **call)
    with pytest.raises(ValueError, match="at least one output"):
        metal_kernel("none", ["a"], [], "")
    with pytest.raises(ValueError, match=r"order must be 0..7, not 8"):
        kernel(inputs=[x], grid=(9, 1, 1), threadgroup=(9, 1, 1), order=8, **call)
    with pytest.raises(ValueError, match="unknown Metal version 300"):
        kernel(inputs=[x], grid=(9, 1, 1), threadgroup=(9, 1, 1), metal=300, **call)


def test_threadgroup_is_clamped_to_the_grid() -> None:
    y = elementwise("out[i] = threads_per_threadgroup.x + 100 * dispatch_threads_per_threadgroup.x;", np.zeros(10))
    np.testing.assert_array_equal(y, [1010] * 10)


def test_permissive_mode_warns() -> None:
    source = "out[i] = a[i];\nif (i % 2 == 0) out[i] = simd_sum(a[i]); else out[i] = simd_max(a[i]);"
    x = np.arange(32, dtype=np.float32)
    with pytest.raises(RunError, match="divergent SIMD-group function"):
        elementwise(source, x)
    y = elementwise(source, x, strict=False)
    np.testing.assert_array_equal(y, np.where(x % 2 == 0, x[::2].sum(), 31))
    assert "divergent SIMD-group function" in last_report().warnings[0]


def test_without_checks_memory_faults_are_still_reported() -> None:
    with pytest.raises(RunError, match="memory fault near element 1024 of 'a'"):
        elementwise("out[i] = a[i + 1024];", np.zeros(1024, np.float32), check=False)
    np.testing.assert_array_equal(elementwise("out[i] = a[i];", np.ones(9, np.float32), check=False), np.ones(9))


def test_too_large_private_arrays() -> None:
    with pytest.raises(MslError, match="thread-private arrays exceed the emulator's stack"):
        elementwise(
            "float s[90000]; s[i] = a[i]; for (int k = 1; k < 90000; ++k) s[k] = s[k - 1]; out[i] = s[7 * i];",
            np.zeros(9, np.float32),
        )


def test_install_replaces_mlx_in_a_block() -> None:
    before = mx.fast.metal_kernel, mx.metal.is_available
    with install(order=3):
        assert mx.metal.is_available()
        kernel = mx.fast.metal_kernel(name="copy", input_names=["a"], output_names=["out"], source=I + "out[i] = a[i];")
        y = kernel(
            inputs=[mx.arange(5)], grid=(5, 1, 1), threadgroup=(5, 1, 1), output_shapes=[(5,)], output_dtypes=[mx.int32]
        )[0]
        assert mx.array_equal(y, mx.arange(5))
    assert (mx.fast.metal_kernel, mx.metal.is_available) == before


def test_readme_example() -> None:
    text = (Path(msl.__file__).parent / "README.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(example, "tests/msl/README.md", "exec"), names)
    assert mx.array_equal(names["y"], (mx.arange(100) * 0.5).astype(mx.float16))
