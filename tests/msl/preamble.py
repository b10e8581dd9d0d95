"""The text MLX puts before every custom kernel (`metal::utils()`), from the headers in the installed wheel."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from .prep import rewrite_preamble

_HEADERS = ("bf16", "bf16_math", "complex", "defines", "logging", "utils")
_FOLDER = "mlx/backend/metal/kernels"


@functools.cache
def preamble() -> str:
    """MLX's preamble as C++ for clang; each header keeps its own name and line numbers."""
    return rewrite_preamble(original())


@functools.cache
def original() -> str:
    """The same as Metal."""
    spec = importlib.util.find_spec("mlx")
    assert spec is not None and spec.submodule_search_locations is not None
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    parts = []
    for name in _HEADERS:
        path = f"{_FOLDER}/{name}.h"
        text = re.sub(r'^[ \t]*(#include ".*\.h"|#pragma once)[ \t]*$', "", (include / path).read_text(), flags=re.M)
        parts.append(f'#line 1 "{path}"\n{text}\n')
    return "".join(parts)
