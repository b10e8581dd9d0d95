"""The README runs: its Python, its links, and the commands it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_examples_run(block: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_commands_and_options_named_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (?:.*\| )?mlxlin (\w+)([^#\n]*)", text, re.M)
    assert lines
    for name, rest in lines:
        done = subprocess.run([sys.executable, "-m", "mlxlin_cli", name, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, name
        for option in re.findall(r"(?<= )--?[a-z][\w-]*", rest):
            assert re.search(rf"{option}\b", done.stdout), f"{name} {option}"


def test_it_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```sh\n(.*?)\n```", text, re.S | re.M)[:2]
    assert first.endswith("mlxlin chat") and "pytest" in second
    assert "<!--" not in text
