"""MLX, made ready: the one place `mlx.core` is imported, and what has to happen before its first operation.

Every module of mlxlin takes MLX from here (`from mlxlin.backend import mx`). On Linux a fast BLAS is put under its
CPU matrix products; on macOS the machine is checked for what Metal needs.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from .blas import install as _install_blas
from .errors import UnsupportedError

_USED_BEFORE = "mlx.core" in sys.modules


def _refuse_unusable_machines() -> None:
    """Clear words where MLX itself would fail with an import error."""
    if sys.platform != "darwin":
        return
    if platform.machine() == "x86_64":
        translated = os.popen("/usr/sbin/sysctl -n sysctl.proc_translated 2>/dev/null").read().strip() == "1"
        what = "This Python runs under Rosetta (x86_64)" if translated else "This is an Intel Mac"
        hint = (
            "Install an arm64 Python, e.g. from python.org." if translated else "mlxlin needs Apple Silicon or Linux."
        )
        raise UnsupportedError(f"{what}; MLX has no build for it.", hint)
    release = platform.mac_ver()[0]
    if release and int(release.split(".")[0]) < 14:
        raise UnsupportedError(f"macOS {release} is too old for MLX.", "Update to macOS 14 or newer.")


_refuse_unusable_machines()
try:
    import mlx.core as mx
except ImportError as error:
    raise UnsupportedError(
        f"MLX cannot be imported: {error}",
        "Install it with: pip install mlx" if sys.platform == "darwin" else "Install it with: pip install 'mlx[cpu]'",
    ) from error

BLAS = _install_blas()


def on_metal() -> bool:
    """Whether operations run on an Apple GPU by default."""
    return bool(mx.metal.is_available()) and mx.default_device() == mx.Device(mx.gpu)


@cache
def compiled(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`function` as MLX fuses it, for arrays of any shape."""
    made: Callable[..., mx.array] = mx.compile(function, shapeless=True)
    return made


def one_dispatch(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A pointwise function of arrays as one dispatch on Metal; on a CPU, MLX would run a C++ compiler for that."""

    @wraps(function)
    def call(*arrays: mx.array) -> mx.array:
        return compiled(function)(*arrays) if on_metal() else function(*arrays)

    return call


def compute_dtype(stored: mx.Dtype) -> mx.Dtype:
    """The dtype to compute in for weights stored as `stored`.

    A GPU computes in the checkpoint's dtype. The CPU backend multiplies half-precision matrices without a BLAS, up to
    sixty times slower than float32, so there everything is computed in float32.
    """
    return stored if mx.default_device() == mx.Device(mx.gpu) else mx.float32


def memory_bytes() -> int:
    """Physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_backend() -> dict[str, Any]:
    """What runs the mathematics here: device, versions, BLAS, threads, memory. Plain values, ready for JSON."""
    import importlib.metadata

    device = mx.device_info()
    return {
        "device": "metal" if on_metal() else str(mx.default_device().type).rsplit(".", 1)[-1],
        "chip": str(device.get("device_name", platform.processor())),
        "architecture": platform.machine(),
        "os": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "python": platform.python_version(),
        "mlx": importlib.metadata.version("mlx"),
        "metal": bool(mx.metal.is_available()),
        "blas": BLAS.name,
        "blas_fast": BLAS.fast,
        "blas_threads": BLAS.threads,
        "blas_note": BLAS.note,
        "mlx_imported_before_us": _USED_BEFORE,
        "memory_bytes": memory_bytes(),
    }


__all__ = ["BLAS", "compute_dtype", "describe_backend", "memory_bytes", "mx", "on_metal"]
