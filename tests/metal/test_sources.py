"""Every kernel through Apple's compiler, where there is one: `xcrun metal` of Xcode."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import resources
from pathlib import Path

import pytest

from .sources import call_every_kernel, recorded

LANGUAGES = ("metal3.1", "metal3.2", "metal4.0", "metal4.1")  # of macOS 14, 15, 26 and 27


@pytest.fixture(autouse=True)
def emulator() -> None:
    """None: nothing runs."""


@cache
def texts() -> dict[str, str]:
    with recorded() as found:
        call_every_kernel()
    return found


def short(name: str) -> str:
    """A kernel's own name in that which MLX gives it."""
    return re.sub(r"^custom_kernel_mlxlin_(\w+?)_[0-9a-f]{12}_.*$", r"\1", name)


def compiled(language: str, path: Path) -> str:
    """What the compiler has to say about a file; empty where it is content."""
    command = ["xcrun", "-sdk", "macosx", "metal", f"-std={language}", "-fno-fast-math", "-c", path.name, "-o"]
    done = subprocess.run(
        [*command, f"{path.stem}.{language}.air"], cwd=path.parent, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"{path.stem}: {done.stderr or 'failed'}"


def test_no_kernel_is_missing() -> None:
    """Each name that a launcher gives a kernel, and each file."""
    folder = resources.files("mlxlin.metal")
    launchers = "".join(x.read_text("utf-8") for x in folder.iterdir() if x.name.endswith(".py"))
    names = set(re.findall(r'\blaunch\(\s*"(\w+)"', launchers))
    assert len(names) > 10
    assert set(map(short, texts())) == names
    everything = "".join(texts().values())
    for path in folder.iterdir():
        if path.name.endswith(".metal"):
            assert path.read_text("utf-8") in everything, path.name


@pytest.mark.parametrize("language", LANGUAGES)
def test_apples_compiler_takes_every_kernel(language: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.metal"
    empty.write_text("#include <metal_stdlib>\n", encoding="utf-8")
    if shutil.which("xcrun") is None or compiled(language, empty):
        pytest.skip(f"there is no `xcrun metal` that knows {language}")
    paths = []
    for i, (name, text) in enumerate(texts().items()):  # MLX's names are longer than those of files may be
        paths.append(tmp_path / f"{short(name)}-{i}.metal")
        paths[-1].write_text(text, encoding="utf-8")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = [found for found in pool.map(partial(compiled, language), paths) if found]
    assert not complaints, "\n".join(complaints)
