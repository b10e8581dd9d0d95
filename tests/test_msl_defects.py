"""Every kind of mistake the emulator claims to find: a kernel that makes it is stopped, its correct twin passes.

The line that is wrong carries `// BUG`; the report must name exactly that line, and the thread.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.msl import SUPPORTED, CompileError, MslError, RunError, last_report, metal_kernel

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the Metal emulator runs on x86-64 Linux")

SETUP = "uint i = thread_position_in_grid.x; uint t = thread_position_in_threadgroup.x;\n"
SHARED = "threadgroup float b[64];\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"

# name, wrong kernel, what the report says, correct twin; 256 threads in groups of 64, input 0, 1, ... 255
DEFECTS = [
    (
        "device load past the end",
        "out[i] = x[i + 1]; // BUG",
        r"out-of-bounds device load: element 256 of 'x' \(256 elements\)",
        "out[i] = x[(i + 1) % 256];",
    ),
    (
        "device load far outside",
        "out[i] = x[i + 100000]; // BUG",
        "out-of-bounds device load: element 100000 of 'x'",
        "out[i] = x[i];",
    ),
    (
        "device load before the start",
        "out[i] = x[(int)i - 1]; // BUG",
        "out-of-bounds device load: element -1 of 'x'",
        "out[i] = i > 0 ? x[(int)i - 1] : 0.0f;",
    ),
    (
        "device store past the end",
        "out[i + 1] = x[i]; // BUG",
        "out-of-bounds device store: element 256 of 'out'",
        "out[(i + 1) % 256] = x[i];",
    ),
    (
        "vector load over the end",
        "float4 v = *(const device packed_float4*)(x + i); // BUG\nout[i] = v.x;",
        "out-of-bounds device load: 16 bytes at element 253 of 'x'",
        "float4 v = i < 253 ? *(const device packed_float4*)(x + i) : float4(0.0f);\nout[i] = v.x;",
    ),
    (
        "threadgroup store outside a variable",
        SHARED
        + "threadgroup float c[64];\nc[t] = 0;\n*(&b[0] + t + 1) = x[i]; // BUG\n"
        + BARRIER
        + "out[i] = b[t] + c[t];",
        "out-of-bounds threadgroup store: byte 256 of 'b'",
        SHARED + "threadgroup float c[64];\nc[t] = 0;\nb[(t + 1) % 64] = x[i];\n" + BARRIER + "out[i] = b[t] + c[t];",
    ),
    (
        "threadgroup array index",
        SHARED + "b[t + 1] = x[i]; // BUG\n" + BARRIER + "out[i] = b[63 - t];",
        "index out of bounds of an array",
        SHARED + "b[t] = x[i];\n" + BARRIER + "out[i] = b[63 - t];",
    ),
    (
        "thread-private array outside",
        "float s[4] = {1, 2, 3, 4};\nout[i] = s[(int)x[i % 8]]; // BUG",
        "index out of bounds of an array",
        "float s[4] = {1, 2, 3, 4};\nout[i] = s[(int)x[i % 4]];",
    ),
    (
        "uninitialised threadgroup memory",
        SHARED + "if (t % 2) b[t] = x[i];\n" + BARRIER + "out[i] = b[63 - t]; // BUG",
        "read of uninitialised threadgroup memory: byte 0 of 'b'",
        SHARED + "b[t] = t % 2 ? x[i] : 0.0f;\n" + BARRIER + "out[i] = b[63 - t];",
    ),
    (
        "uninitialised output",
        "out[i] += x[i]; // BUG",
        "read of uninitialised output 'out' element 0",
        "out[i] = x[i]; out[i] += x[i];",
    ),
    (
        "variable used before it is set",
        "float s;\nfloat d = s + 1; // BUG\ns = x[i];\nout[i] = s + d;",
        "source line 3:.*variable 's' is uninitialized when used here",
        "float s;\ns = x[i];\nfloat d = s + 1;\nout[i] = s + d;",
    ),
    (
        "variable set on one path only",
        "float s;\nif (x[i] < 200) s = x[i];\nout[i] = s + 1; // BUG",
        "the value stored to element 200 of 'out' comes from an uninitialised variable",
        "float s;\nif (x[i] < 200) s = x[i]; else s = 0;\nout[i] = s + 1;",
    ),
    (
        "uninitialised element of a private array",
        "float s[4];\nfor (int k = 0; k < 3; ++k) s[k] = x[i];\nout[i] = s[i % 4] * 2; // BUG",
        "the value stored to element 3 of 'out' comes from an uninitialised variable",
        "float s[4];\nfor (int k = 0; k < 4; ++k) s[k] = x[i];\nout[i] = s[i % 4] * 2;",
    ),
    (
        "output never written",
        "if (i != 7) out[i] = x[i];",
        r"output 'out': 1 of 256 elements never written \(first: \(7,\)\)",
        "out[i] = i != 7 ? x[i] : 0.0f;",
    ),
    (
        "missing barrier",
        SHARED + "b[t] = x[i];\nout[i] = b[63 - t]; // BUG",
        "data race on threadgroup memory 'b'|uninitialised threadgroup memory",
        SHARED + "b[t] = x[i];\n" + BARRIER + "out[i] = b[63 - t];",
    ),
    (
        "barrier that orders nothing",
        SHARED + "b[t] = x[i];\nthreadgroup_barrier(mem_flags::mem_none);\nout[i] = b[63 - t]; // BUG",
        "data race on threadgroup memory 'b' at byte 0: this load is not ordered with an access by thread 0",
        SHARED + "b[t] = x[i];\n" + BARRIER + "out[i] = b[63 - t];",
    ),
    (
        "barrier for the other memory",
        "out[i] = x[i];\n" + BARRIER + "if (t < 32) out[i] += out[i + 32]; // BUG",
        "data race on device memory 'out'",
        "out[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nif (t < 32) out[i] += out[i + 32];",
    ),
    (
        "scratch reused too early",
        SHARED
        + "float s = 0;\nfor (int k = 0; k < 2; ++k) {\nb[t] = x[i] + k;\n"
        + BARRIER
        + "s += b[63 - t]; // BUG\n}\nout[i] = s;",
        "data race on threadgroup memory 'b'.*this load is not ordered",
        SHARED
        + "float s = 0;\nfor (int k = 0; k < 2; ++k) {\n"
        + BARRIER
        + "b[t] = x[i] + k;\n"
        + BARRIER
        + "s += b[63 - t];\n}\nout[i] = s;",
    ),
    (
        "SIMD-group barrier across SIMD-groups",
        SHARED + "b[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = b[63 - t]; // BUG",
        "data race on threadgroup memory 'b'|uninitialised threadgroup memory",
        SHARED + "b[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = b[t ^ 1];",
    ),
    (
        "reliance on SIMD lock-step",
        SHARED + "b[t] = x[i];\nfloat s = simd_sum(x[i]);\nout[i] = s + b[t ^ 1]; // BUG",
        "data race on threadgroup memory 'b'",
        SHARED
        + "b[t] = x[i];\nfloat s = simd_sum(x[i]);\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        + "out[i] = s + b[t ^ 1];",
    ),
    (
        "write after many reads of one SIMD-group",
        SHARED
        + "if (t % 32 == 0) b[t] = x[i];\n"
        + BARRIER
        + "float s = b[t & 32];\nif (t % 32 == 0) b[t] = s + 1; // BUG\n"
        "out[i] = s;",
        "data race on threadgroup memory 'b'.*several threads",
        SHARED
        + "if (t % 32 == 0) b[t] = x[i];\n"
        + BARRIER
        + "float s = b[t & 32];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        + "if (t % 32 == 0) b[t] = s + 1;\nout[i] = s;",
    ),
    (
        "two threads write one element",
        "out[i / 2] = x[i]; // BUG\nout[128 + i / 2] = x[i];",
        "data race on device memory 'out'.*this store.*thread 0 of threadgroup 0",
        "if (i % 2 == 0) { out[i / 2] = x[i]; out[128 + i / 2] = x[i]; }",
    ),
    (
        "race between threadgroups",
        "out[i] = x[i]; // BUG\nthreadgroup_barrier(mem_flags::mem_device);\nout[(i + 64) % 256] = 1.0f;",
        "data race on device memory 'out'.*of threadgroup",
        "out[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nout[i - t + (t + 32) % 64] = 1.0f;",
    ),
    (
        "divergent barriers",
        SHARED
        + "b[t] = x[i];\nif (t < 32) "
        + BARRIER
        + "else "
        + BARRIER.replace("\n", " // BUG\n")
        + "out[i] = b[63 - t];",
        "divergent threadgroup_barrier",
        SHARED + "b[t] = x[i];\n" + BARRIER + "out[i] = b[63 - t];",
    ),
    (
        "return before a barrier",
        SHARED
        + "b[t] = x[i];\nif (t == 5) { out[i] = 0; return; }\n"
        + BARRIER.replace("\n", " // BUG\n")
        + "out[i] = b[63 - t];",
        "threadgroup_barrier .* not reached by 1 of 64 threads",
        SHARED + "b[t] = x[i];\n" + BARRIER + "if (t == 5) { out[i] = 0; return; }\nout[i] = b[63 - t];",
    ),
    (
        "divergent SIMD functions",
        "float v = x[i];\nif (t % 2)\nv = simd_sum(v);\nelse\nv = simd_max(v); // BUG\nout[i] = v;",
        "divergent SIMD-group function",
        "float v = x[i];\nfloat s = simd_sum(v), m = simd_max(v);\nout[i] = t % 2 ? s : m;",
    ),
    (
        "one SIMD function through two divergent calls",
        "float v = x[i];\nif (t % 2) v = total(v); else v = total(v + 1); // BUG\nout[i] = v;",
        "divergent SIMD-group function.*through different calls",
        "float v = x[i];\nout[i] = total(t % 2 ? v : v + 1);",
    ),
    (
        "SIMD function after some lanes returned",
        "float v = x[i];\nif (t % 2) { out[i] = 0; return; }\nout[i] = simd_sum(v); // BUG",
        "SIMD function reached by 16 of 32 lanes",
        "float v = simd_sum(t % 2 ? 0 : x[i]);\nout[i] = t % 2 ? 0.0f : v;",
    ),
    (
        "SIMD function meets a barrier",
        SHARED
        + "b[t] = x[i];\nfloat v = 0;\nif (t % 2) "
        + BARRIER
        + "else v = simd_sum(x[i]); // BUG\nout[i] = v + b[t];",
        "divergent SIMD-group function: lane 0 .* while lane 1 waits at the barrier",
        SHARED + "b[t] = x[i];\nfloat v = simd_sum(x[i]);\n" + BARRIER + "out[i] = v + b[t];",
    ),
    (
        "divergent SIMD-group barrier",
        SHARED
        + "b[t] = x[i];\nif (t % 2) simdgroup_barrier(mem_flags::mem_threadgroup); // BUG\nelse {\n"
        + BARRIER
        + "}\nout[i] = b[t];",
        "divergent simdgroup_barrier",
        SHARED + "b[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n" + BARRIER + "out[i] = b[t];",
    ),
    (
        "shuffle from a lane that does not exist",
        "out[i] = simd_shuffle(x[i], ushort(t % 32 + 1)); // BUG",
        "SIMD function reads lane 32, which is inactive or does not exist",
        "out[i] = simd_shuffle(x[i], ushort((t + 1) % 32));",
    ),
    (
        "shuffle by a lane-dependent delta",
        "out[i] = simd_shuffle_down(x[i], ushort(t & 1)); // BUG",
        "differs between lanes: 0 and 1",
        "out[i] = simd_shuffle_down(x[i], ushort(1));",
    ),
    (
        "misaligned vector load",
        "if (i >= 60) { out[i] = 0; return; }\nfloat4 v = *(const device float4*)(x + i); // BUG\nout[i] = v.x;",
        "misaligned 16-byte load",
        "float4 v = *(const device float4*)(x + i / 4 * 4);\nout[i] = v.x;",
    ),
    (
        "too much threadgroup memory",
        "threadgroup float big[8193]; // BUG\nbig[t] = x[i];\n" + BARRIER + "out[i] = big[t];",
        "threadgroup memory: 'big' brings the total to 32772 bytes; the limit is 32768",
        "threadgroup float big[8192];\nbig[t] = x[i];\n" + BARRIER + "out[i] = big[t];",
    ),
    (
        "integer division by zero",
        "int zero = (int)x[0];\nout[i] = (float)(5 / zero); // BUG",
        "integer division by zero",
        "int one = (int)x[1];\nout[i] = (float)(5 / one);",
    ),
    (
        "signed overflow of an index",
        "int n = (int)x[70] * 1000;\nout[i] = x[(n * n) % 256]; // BUG",
        "signed integer overflow in multiplication",
        "uint n = (uint)x[70] * 1000;\nout[i] = x[(n * n) % 256];",
    ),
    (
        "shift out of range",
        "out[i] = (float)(1 << (int)x[i]); // BUG",
        "shift amount out of range",
        "out[i] = (float)(1u << ((uint)x[i] & 31));",
    ),
    (
        "float to integer out of range",
        "out[i] = (float)(int)(x[i] * 1e9f); // BUG",
        "float value out of range",
        "out[i] = (float)(int)(x[i] * 1e6f);",
    ),
]
HEADER = "inline float total(float v) {\nreturn simd_sum(v);\n}\n"


def run(source: str, **options: Any) -> np.ndarray[Any, Any]:
    kernel = metal_kernel("defect", ["x"], ["out"], SETUP + source, header=HEADER, **options)
    x = np.arange(256, dtype=np.float32)
    return kernel(
        inputs=[x], grid=(256, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(256,)], output_dtypes=[np.float32]
    )[0]


@pytest.mark.parametrize(("wrong", "message"), [pytest.param(d[1], d[2], id=d[0]) for d in DEFECTS])
def test_wrong_kernel_is_stopped(wrong: str, message: str) -> None:
    with pytest.raises(MslError) as caught:
        run(wrong)
    report = str(caught.value)
    assert re.search(message, report), report
    lines = [n for n, line in enumerate((SETUP + wrong).split("\n"), 1) if "// BUG" in line]
    if lines:
        inside_helper = "through different calls" in report
        assert inside_helper or f"source line {lines[0]}:" in report, report
        thread = r"\[thread \(\d+,0,0\) of threadgroup \(\d,0,0\), simdgroup \d lane \d+\]"
        assert isinstance(caught.value, CompileError) or re.search(thread, report)


@pytest.mark.parametrize("wrong", [pytest.param(d[1], id=d[0]) for d in DEFECTS])
def test_wrong_kernel_is_stopped_under_other_schedules(wrong: str) -> None:
    for order in (1, 2, 4, 7):
        with pytest.raises(MslError):
            run(wrong, order=order)


@pytest.mark.parametrize("right", [pytest.param(d[3], id=d[0]) for d in DEFECTS])
def test_correct_twin_passes(right: str) -> None:
    results = [run(right, order=order) for order in (0, 7)]
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)
    assert last_report().warnings == ()


def test_waiting_for_another_thread_is_stopped() -> None:
    """Nothing promises that the other thread ever runs; here it does in one schedule and not in the other."""
    source = """
    threadgroup atomic_int flag;
    if (t == 0) atomic_store_explicit(&flag, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 32) atomic_store_explicit(&flag, 1, memory_order_relaxed);
    if (t == 0) while (atomic_load_explicit(&flag, memory_order_relaxed) == 0) {}
    out[i] = x[i];
    """
    run(source, order=0)
    with pytest.raises(RunError, match=r"source line 7:.*32 million accesses .* wait for another thread\?"):
        run(source, order=2)
