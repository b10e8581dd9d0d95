"""The package from outside: public names, start-up cost, the shipped files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mlxlin


def test_every_public_name_exists() -> None:
    for name in mlxlin.__all__:
        assert getattr(mlxlin, name) is not None, name
    assert not hasattr(mlxlin, "no_such_name")


def test_public_names_survive_importing_their_modules() -> None:
    code = "import mlxlin, importlib\n" + "\n".join(
        f"importlib.import_module('mlxlin.{home}')" for home in sorted(set(mlxlin._HOME.values()))
    )
    code += "\nassert all(callable(getattr(mlxlin, n)) for n in mlxlin._HOME), "
    code += "[n for n in mlxlin._HOME if not callable(getattr(mlxlin, n))]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, mlxlin; print([m for m in ('mlx', 'numpy', 'tokenizers', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("system", "machine", "wanted"),
    [
        ("darwin", "arm64", ["mlx"]),
        ("darwin", "x86_64", []),
        ("linux", "x86_64", ["mlx"]),
        ("linux", "aarch64", ["mlx"]),
    ],
)
def test_it_can_be_installed_where_mlx_has_no_build_and_say_so(system: str, machine: str, wanted: list[str]) -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.S | re.M)
    assert listed is not None
    needs = [Requirement(text) for text in re.findall(r'^  "(mlx[^"]*)"', listed[1], re.M)]
    place = {"sys_platform": system, "platform_machine": machine}
    assert [need.name for need in needs if need.marker is None or need.marker.evaluate(place)] == wanted
