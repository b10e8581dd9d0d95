"""A Metal kernel is used once it has given the definition's numbers on this machine.

Compilers, drivers and limits differ between chips and systems, and what is wrong with a kernel shows only when it runs.
So each kernel runs a small call of the kind it is about to serve first, and the verdict is kept in a file, by chip,
system, MLX version and kernel source.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlxlin.backend import mx
from mlxlin.errors import KernelWarning
from mlxlin.metal.kernels import digest

from .reference import scan_float64
from .rules import Inputs
from .samples import sample_like

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}

Kernel = Callable[[Inputs], tuple[mx.array, mx.array, mx.array | None]]


def trusted(name: str, kernel: Kernel, x: Inputs, width: int) -> bool:
    """Whether `kernel` gives the definition's numbers for calls like `x`; checked once, then remembered.

    `width` is what else it was compiled for: rows per lane or columns per SIMD-group.
    """
    key = "-".join(
        [
            name,
            x.rule.name,
            x.decay,
            f"K{x.q.shape[3]}",
            f"V{x.v.shape[3]}",
            f"x{x.value_heads // x.heads}",
            f"n{x.substeps}",
            f"w{width}",
            str(x.v.dtype).rsplit(".", 1)[-1],
            *(["normalized"] if x.Z is not None else []),
        ]
    )
    return trusted_by_key(key, lambda: complaint(kernel, sample_like(x, 5 if name == "scan" else 35)))


def trusted_by_key(key: str, examine: Callable[[], str]) -> bool:
    """Whether `examine` has found nothing to complain about, here or in an earlier process.

    Whatever it raises is a complaint too: compile errors come when a kernel is evaluated. A kernel that is found wrong
    is warned of, once; later `failures` lists it. The key begins with the kernel's name.
    """
    known = _verdicts()
    if key not in known:
        try:
            known[key] = examine()
        except Exception as error:
            known[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        _remember(known)
        if known[key]:
            text = (
                f"the Metal kernel '{key.partition('-')[0]}' failed its check on this machine and is not used: "
                f"{known[key]}. Plain operations do its work, more slowly; `mlxlin selftest` shows more. ({key})"
            )
            warnings.warn(text, KernelWarning, stacklevel=3)
    return not known[key]


def failures() -> dict[str, str]:
    """Kernels that failed on this machine, and how."""
    return {key: text for key, text in _verdicts().items() if text}


def complaint(kernel: Kernel, x: Inputs) -> str:
    """What is wrong with a kernel's results for x; empty where nothing is."""
    results = [z for z in kernel(x) if z is not None]
    expected = [z for z in scan_float64(x) if z is not None]
    errors = [relative_error(found, wanted) for found, wanted in zip(results, expected, strict=True)]
    limits = [TOLERANCE[x.v.dtype], *[TOLERANCE[mx.float32]] * (len(errors) - 1)]
    wrong = [error for error, limit in zip(errors, limits, strict=True) if not error < limit]
    return f"results are off by {max(wrong):.1e}" if wrong else ""


def relative_error(found: mx.array, expected: npt.NDArray[np.float64]) -> float:
    """RMS of the difference relative to the RMS of what is expected; absolute where that is zero."""
    difference = float64(found) - expected
    return float(np.sqrt(np.mean(difference**2)) / (np.sqrt(np.mean(expected**2)) or 1.0))


def float64(x: mx.array) -> npt.NDArray[np.float64]:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _machine() -> str:
    device = str(mx.device_info().get("device_name", platform.processor()))
    system = f"{platform.system()} {platform.mac_ver()[0] or platform.release()}"
    return " | ".join([device, system, f"MLX {version('mlx')}", digest()])


def _file() -> Path:
    if configured := os.environ.get("MLXLIN_HOME"):
        folder = Path(configured)
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "mlxlin"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxlin"
    return folder / "kernels.json"


@cache
def _verdicts() -> dict[str, str]:
    """Complaints by kernel, empty for kernels that are right; of this machine and these kernels alone."""
    try:
        record = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = record.get(_machine(), {}) if isinstance(record, dict) else {}
    return dict(found) if isinstance(found, dict) else {}


def _remember(verdicts: dict[str, str]) -> None:
    """Write the file anew; where that is impossible the kernels are checked again next time."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({_machine(): verdicts}, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        return
