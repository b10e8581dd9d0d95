"""Which code runs a call: one table, read from the top; the first path that serves the call runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxlin.backend import mx, on_metal

from . import chunkwise, kernels, step
from .rules import DecayKind, Inputs

Result = tuple[mx.array, mx.array, mx.array | None]
DECAYS: tuple[DecayKind, ...] = ("none", "head", "channel", "value")
LARGE_STATE = 256 * 256


@dataclass(frozen=True)
class Path:
    """One way to run a call.

    Attributes:
        name: for people.
        decays: the decay kinds it takes.
        tokens: the least and the greatest number of (sub-)tokens it takes, None without limit.
        run: (inputs with one sub-step per token, chunk length) -> (y, S, Z).
        chunked: whether it heeds the chunk length.
        takes: whether a kernel can run the call, here and now; None for plain operations, which always can. A kernel
            sees lengths and sub-tokens as they came, plain operations get neutral padding and one sub-step per token.
        heads: sizes that it takes, and what else it asks of a call, for people.
    """

    name: str
    decays: tuple[DecayKind, ...]
    tokens: tuple[int, int | None]
    run: Callable[[Inputs, int], Result]
    chunked: bool = True
    takes: Callable[[Inputs], bool] | None = None
    heads: str = "any"

    def serves(self, x: Inputs) -> bool:
        least, most = self.tokens
        fits = x.decay in self.decays and least <= x.tokens and (most is None or x.tokens <= most)
        return fits and (self.takes is None or self.takes(x))


def _step(x: Inputs, chunk: int) -> Result:
    return step.run(x)


def _scan_kernel(x: Inputs, chunk: int) -> Result:
    return kernels.scan(x)


def _chunk_kernels(x: Inputs, chunk: int) -> Result:
    return kernels.chunk(x)


# Where a few steps cost as much as one chunk of 16 was measured on the CPU; a channel decay makes a chunk dearer.
PATHS = (
    Path(
        "chunk kernels",
        kernels.CHUNKED,
        (32, None),
        _chunk_kernels,
        chunked=False,
        takes=kernels.takes_chunk,
        heads=f"{kernels.HEADS}, no normaliser",
    ),
    Path("scan kernel", DECAYS, (1, None), _scan_kernel, chunked=False, takes=kernels.takes_scan, heads=kernels.HEADS),
    Path("step", ("none", "head"), (1, 4), _step, chunked=False),
    Path("step", ("channel", "value"), (1, 8), _step, chunked=False),
    Path("chunkwise", DECAYS, (1, None), chunkwise.run),
)


def choose(x: Inputs, chunk: int | None = None) -> Path:
    """The path of a call; naming a chunk length asks for one that works by chunks."""
    return next(path for path in PATHS if (chunk is None or path.chunked) and path.serves(x))


def chunk_length(x: Inputs) -> int:
    """Tokens per chunk. 32 and 64 measured within a tenth of each other for every rule and head size on the CPU.

    Passes over a large state want longer chunks; pairs of tokens, the inverse and its accuracy shorter ones, where
    LAPACK does not invert whole chunks.
    """
    large = x.S.shape[-2] * x.S.shape[-1] >= LARGE_STATE
    return 64 if large and mx.default_device() == mx.Device(mx.cpu) else 32


def table() -> list[dict[str, str]]:
    """The paths of this machine as rows to print."""
    rows = []
    for path in PATHS:
        device = "any" if path.takes is None else "metal"
        if device == "metal" and not on_metal():
            continue
        least, most = path.tokens
        tokens = f"{least} or more" if most is None else f"{least} to {most}"
        decay = ", ".join(path.decays)
        rows.append({"path": path.name, "device": device, "decay": decay, "tokens": tokens, "heads": path.heads})
    return rows
