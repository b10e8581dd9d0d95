"""What the emulator reports. All of them are wrong kernels or wrong calls, never emulator options."""

from __future__ import annotations

from typing import NamedTuple


class MslError(Exception):
    """Base class: a kernel that Metal would reject, or that is wrong when it runs."""


class CompileError(MslError):
    """The source does not compile (the counterpart of "Unable to build metal library from source")."""


class Finding(NamedTuple):
    """One violated language rule."""

    rule: str  # short name, e.g. "address-space"
    part: str  # "header", "source" or "kernel" (a line of the generated text)
    line: int  # 1-based line of that part
    message: str

    def __str__(self) -> str:
        return f"{self.part} line {self.line}: {self.message} [{self.rule}]"


class LintError(MslError):
    """The source compiles with clang but breaks a rule of the Metal shading language."""

    def __init__(self, kernel: str, findings: list[Finding]) -> None:
        self.findings = findings
        super().__init__("\n".join([f"{kernel}: not valid Metal:", *(f"  {finding}" for finding in findings)]))


class RunError(MslError):
    """The kernel did something undefined while running; the message names source line and thread."""
