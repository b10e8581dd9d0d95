"""The kernels' text; what Metal's compiler would say about it is the emulator's business."""

from __future__ import annotations

from importlib import resources


def test_lines_are_short_and_files_too() -> None:
    folder = resources.files("mlxlin.metal")
    texts = {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.name.endswith(".metal")}
    assert len(texts) > 5
    for name, text in texts.items():
        lines = text.splitlines()
        assert len(lines) <= 250, name
        assert max(map(len, lines)) <= 120, name
