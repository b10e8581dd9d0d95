"""What Apple's compiler would refuse and the emulator does not know."""

from __future__ import annotations

import re
from importlib import resources

# Types and functions of Metal's standard library that lie in `metal`, whose names `using namespace metal` makes
# ambiguous with functions of ours: matrices, texture options, type traits.
TAKEN = {
    "array",
    "atomic",
    "bias",
    "color",
    "component",
    "coord",
    "decay",
    "gradient2d",
    "level",
    "matrix",
    "sampler",
    "vec",
}
FUNCTION = re.compile(r"^(?:template <.*> )?(?:inline|constexpr|struct)\b[^;{(]*?\b(\w+)\s*[({]", re.M)


def texts() -> dict[str, str]:
    folder = resources.files("mlxlin.metal")
    return {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.name.endswith(".metal")}


def test_names_do_not_collide_with_metal() -> None:
    defined = {}
    for name, text in texts().items():
        defined[name] = set(FUNCTION.findall(re.sub(r",\n\s+", ", ", text)))
        assert not defined[name] & TAKEN, name
    assert {"row", "to_next", "View"} <= defined["common.metal"] and {"chunk", "State"} <= defined["chunk.metal"]


def test_lines_are_short_and_files_too() -> None:
    for name, text in texts().items():
        lines = text.splitlines()
        assert len(lines) <= 250, name
        assert max(map(len, lines)) <= 120, name
