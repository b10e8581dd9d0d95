"""The cache of compiled kernels: complete or absent, shared by processes, private to the user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.msl import SUPPORTED, toolchain

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the Metal emulator runs on x86-64 Linux")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MLXLIN_MSL_CACHE", str(tmp_path / "cache"))
    toolchain.cache_folder.cache_clear()
    yield tmp_path / "cache"
    toolchain.cache_folder.cache_clear()


def test_a_folder_is_built_once(folder: Path) -> None:
    builds = []

    def build(target: Path) -> None:
        builds.append(target)
        (target / "part").write_text("whole")

    for _ in range(3):
        assert (toolchain.cached_folder("thing", build) / "part").read_text() == "whole"
    assert len(builds) == 1
    assert [path.name for path in folder.iterdir()] == ["thing"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail(target: Path) -> None:
        (target / "part").write_text("half")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        toolchain.cached_folder("thing", fail)
    assert list(folder.iterdir()) == []


def test_the_second_of_two_builders_takes_the_first_one_s_result(folder: Path) -> None:
    def slow(target: Path) -> None:
        (target / "part").write_text("second")
        toolchain.cached_folder("thing", lambda other: (other / "part").write_text("first"))  # meanwhile, elsewhere

    assert (toolchain.cached_folder("thing", slow) / "part").read_text() == "first"
    assert [path.name for path in folder.iterdir()] == ["thing"]


def test_processes_share_a_cold_cache(tmp_path: Path) -> None:
    """Two processes that start at the same time, as pytest-xdist's do, both build and both get the right answer."""
    program = """
import numpy as np
from tests.msl import metal_kernel
kernel = metal_kernel("twice", ["a"], ["out"], "uint i = thread_position_in_grid.x; out[i] = 2 * a[i];")
x = np.arange(9, dtype=np.float32)
print(kernel(inputs=[x], grid=(9, 1, 1), threadgroup=(9, 1, 1), output_shapes=[(9,)], output_dtypes=[x.dtype])[0].sum())
"""
    environment = {**os.environ, "MLXLIN_MSL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", program]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == ["72.0", "72.0"]
    left = sorted(re.sub(r"-[0-9a-f]{24}", "", path.name) for path in (tmp_path / "cache").iterdir())
    assert left == ["front", "kernel_checked", "preamble.h", "preamble.pch", "runtime"]
