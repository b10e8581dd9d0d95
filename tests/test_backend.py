"""MLX made ready: the BLAS under its CPU products, and clear words on machines it cannot run on."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from mlxlin import backend, blas
from mlxlin.backend import compute_dtype, describe_backend, mx
from mlxlin.models.activations import relu2, sigmoid_gated, swiglu
from mlxlin.sampling import _reaches, _weights


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_products_are_right() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 65, 65)).astype(np.float32)
    for left, right in ((a, b), (a.T, b), (a, b.T)):
        ours = np.array(mx.array(left) @ mx.array(right))
        np.testing.assert_allclose(ours, left.astype(np.float64) @ right.astype(np.float64), atol=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have a fast BLAS of their own")
def test_openblas_serves_products_even_after_mlx_was_used() -> None:
    out = run("""
        import mlx.core as mx
        a = mx.ones((8, 8)); mx.eval(a @ a)
        from mlxlin.backend import describe_backend
        d = describe_backend()
        print(d["blas_fast"], d["mlx_imported_before_us"], float((a @ a).sum()))
    """)
    assert out == "True True 512.0"


@pytest.mark.skipif(sys.platform != "linux", reason="the reference BLAS is a matter of MLX's Linux wheel")
def test_without_openblas_it_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_openblas", lambda: None)
    found = blas.install()
    assert not found.fast and "scipy-openblas32" in found.note


@pytest.mark.skipif(sys.platform != "linux", reason="the reference BLAS is a matter of MLX's Linux wheel")
def test_an_unexpected_library_leaves_mlx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_slots", lambda path: iter([("another_function", 0)]))
    found = blas.install()
    assert not found.fast and "cblas_sgemm" in found.note


@pytest.mark.parametrize(("load", "threads"), [(0.2, 4), (1.4, 3), (2.6, 1), (30.0, 1)])
def test_no_more_blas_threads_than_idle_processors(monkeypatch: pytest.MonkeyPatch, load: float, threads: int) -> None:
    monkeypatch.setattr(blas.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(blas.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert blas.idle_cpus() == threads


@pytest.mark.parametrize(
    ("machine", "release", "translated", "words"),
    [
        ("x86_64", "15.1", "1", "Rosetta"),
        ("x86_64", "15.1", "0", "Intel Mac"),
        ("arm64", "13.6", "0", "macOS 13.6 is too old"),
    ],
)
def test_macs_it_cannot_run_on(machine: str, release: str, translated: str, words: str) -> None:
    out = run(f"""
        import io, os, platform, sys
        sys.platform = "darwin"
        platform.machine = lambda: {machine!r}
        platform.mac_ver = lambda: ({release!r}, ("", "", ""), {machine!r})
        os.popen = lambda command: io.StringIO({translated!r})
        try:
            import mlxlin.backend
        except Exception as error:
            print(type(error).__name__, error.message, "|", error.hint)
    """)
    assert out.startswith("UnsupportedError") and words in out and not out.endswith("| ")


def test_compute_dtype_on_a_cpu_is_float32() -> None:
    if mx.default_device() == mx.Device(mx.cpu):
        assert compute_dtype(mx.bfloat16) == mx.float32
    else:
        assert compute_dtype(mx.bfloat16) == mx.bfloat16


def test_description_is_plain_data() -> None:
    import json

    description = describe_backend()
    assert json.loads(json.dumps(description)) == description
    assert description["memory_bytes"] > 2**30


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles for the CPU with g++")
@pytest.mark.parametrize("function", [swiglu, sigmoid_gated, relu2, _reaches, _weights], ids=lambda f: f.__name__)
def test_what_is_one_dispatch_on_metal_computes_the_same(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for all shapes, and for numbers that are broadcast over the last axis."""
    count = len(inspect.signature(function).parameters)
    for tokens, narrow in ((1, False), (5, False), (3, True)):
        arrays = [mx.random.uniform(0.1, 2, (2, tokens, 16), key=mx.random.key(i)) for i in range(count)]
        arrays[-1] = arrays[-1][..., :1] if narrow and count > 1 else arrays[-1]
        plain = function(*arrays)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "on_metal", lambda: True)
            fused = function(*arrays)
        assert fused.shape == plain.shape and mx.allclose(fused.astype(mx.float32), plain.astype(mx.float32), 1e-6)
