"""Every test here runs the kernels in the emulator, which reports what a GPU would silently get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mlxlin.metal import kernels
from tests.msl import SUPPORTED, install


@contextmanager
def emulated(**options: Any) -> Iterator[None]:
    """Metal as the emulator; kernels made before under other options are forgotten."""
    with install(**options):
        kernels.kernel.cache_clear()
        yield
    kernels.kernel.cache_clear()


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    if not SUPPORTED:
        pytest.skip("the Metal emulator runs on x86-64 Linux")
    with emulated():
        yield
