"""Converted folders this person made, wherever they are, so that `mlxlin models` can list them."""

from __future__ import annotations

from pathlib import Path


def _list() -> Path:
    from mlxlin.store import home

    return home() / "converted-folders"


def known() -> list[Path]:
    """Converted folders that still exist, in the order they were made."""
    try:
        paths = [Path(line) for line in _list().read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    return [path for path in dict.fromkeys(paths) if (path / "mlxlin.json").is_file()]


def remember(folder: Path) -> None:
    """Add a folder, and forget those that are gone."""
    paths = [*known(), folder.resolve()]
    path = _list()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text("".join(f"{found}\n" for found in dict.fromkeys(paths)), encoding="utf-8")
