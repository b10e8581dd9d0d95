"""Runs Metal kernels of `mx.fast.metal_kernel` on a CPU and reports what a GPU would silently get wrong."""

from __future__ import annotations

from .errors import CompileError, Finding, LintError, MslError, RunError
from .kernel import install, last_report, metal_kernel
from .report import Report
from .toolchain import SUPPORTED

__all__ = [
    "SUPPORTED",
    "CompileError",
    "Finding",
    "LintError",
    "MslError",
    "Report",
    "RunError",
    "install",
    "last_report",
    "metal_kernel",
]
