"""Which code runs a call: one table, read from the top; the first path that serves the call runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxlin.backend import mx

from . import chunkwise, step
from .rules import DecayKind, Inputs

Result = tuple[mx.array, mx.array, mx.array | None]
# What measured fastest with K = V = 64 and 128: a channel decay costs more per pair of tokens than it saves per chunk.
CHUNK: dict[DecayKind, int] = {"none": 64, "head": 64, "channel": 32}


@dataclass(frozen=True)
class Path:
    """One way to run a call.

    Attributes:
        name: for people.
        device: the device type it runs on, None for any.
        tokens: the least and the greatest number of tokens it takes, None without limit.
        run: (inputs with one sub-step per token, chunk length) -> (y, S, Z).
    """

    name: str
    device: mx.DeviceType | None
    tokens: tuple[int, int | None]
    run: Callable[[Inputs, int], Result]

    def serves(self, x: Inputs) -> bool:
        least, most = self.tokens
        if self.device is not None and mx.default_device().type != self.device:
            return False
        return least <= x.tokens and (most is None or x.tokens <= most)


PATHS = (
    Path("step", None, (1, 2), lambda x, _: step.run(x)),
    Path("chunkwise", None, (1, None), chunkwise.run),
)


def choose(x: Inputs, chunk: int | None) -> Path:
    """The path of a call; naming a chunk length asks for the first path that works by chunks."""
    candidates = PATHS if chunk is None else [path for path in PATHS if path.name != "step"]
    return next(path for path in candidates if path.serves(x))


def table() -> list[dict[str, str]]:
    """The paths of this machine as rows to print."""
    rows = []
    for path in PATHS:
        least, most = path.tokens
        device = "any" if path.device is None else str(path.device).rsplit(".", 1)[-1]
        rows.append({"path": path.name, "device": device, "tokens": f"{least}..{'' if most is None else most}"})
    return rows
