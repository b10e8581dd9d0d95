"""Addresses beyond 2^32 elements: kernels with outputs that large, of which only the last row of the batch is computed.

All rows are the same numbers: the inputs are broadcast. The outputs lie in reserved memory, of which only what a kernel
touches takes any. The last row must have the bits of the same row computed alone, at near addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.metal import kernels
from mlxlin.metal.decode import decode, replay
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.mixer import FusedSpec, Projected, Tape
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import Arguments, chunk, scan
from mlxlin.metal.rwkv7 import TimeMix, finish, prepare, time_mix
from mlxlin.recurrences.rwkv7 import sample
from tests.msl import MslError

from .cases import Case, arguments
from .conftest import emulated
from .test_decode import Call
from .test_layers import normal

FAR = 2**32  # elements: offsets of neither int nor uint reach the last row


@dataclass(frozen=True, eq=False)
class Replayed:
    """What `replay` reads, in one row."""

    spec: FusedSpec
    S: mx.array
    accepted: mx.array
    tape: Tape


def mixed(name: str) -> Any:
    spec, x = Call(name, T=2, dtype=mx.float16).projected()
    return lambda y: decode(spec, y, tape=True), x


def recurrence(kernel: Callable[[Arguments], Any], rule: str, **settings: Any) -> Any:
    return kernel, arguments(Case(rule, T=18, dtype=mx.float16, **settings).inputs())


def replayed() -> Any:
    spec, x = Call("low_rank", T=2).projected()
    tape = decode(spec, x, tape=True).tape
    assert tape is not None
    return lambda y: replay(y.spec, y.S, y.tape, y.accepted), Replayed(spec, x.S, mx.array([1]), tape)


def prefilled(name: str) -> Any:
    spec, x = Call(name, T=2, dtype=mx.float16).projected()
    return lambda y: prefill(spec, y), x


def time_mixed(kernel: Callable[[TimeMix], Any]) -> Any:
    x = sample(3, 32, 2, mx.float16)
    first = {f.name: z[:1] for f in fields(x) if getattr(z := getattr(x, f.name), "shape", (0,))[0] == 2}
    return kernel, replace(x, **first)


CALLS: dict[str, Callable[[], Any]] = {
    "scan": lambda: recurrence(scan, "gated_delta"),
    "scan-normalised": lambda: recurrence(lambda x: scan(x, normalize=True), "linear", normalize=True),
    "chunk-head": lambda: recurrence(chunk, "gated_delta"),
    "chunk-channel": lambda: recurrence(chunk, "dplr"),
    "decode": lambda: mixed("kda"),
    "decode-low_rank": lambda: mixed("low_rank"),
    "decode-normalised": lambda: mixed("normalised"),
    "replay": replayed,
    "prefill": lambda: prefilled("gated_delta_net"),
    "prefill-steps": lambda: prefilled("mamba2"),
    "prefill-bonus": lambda: prefilled("rwkv6"),
    "prefill-reader": lambda: prefilled("comba"),
    "time_mix": lambda: time_mixed(lambda x: time_mix(x, tape=True)),
    "time_mix_prefill": lambda: time_mixed(prepare),
    "time_mix_finish": lambda: time_mixed(lambda x: finish(x, *(z.reshape(*z.shape[:2], 3, 32) for z in (x.k, x.v)))),
    "add_norm": lambda: (lambda x: add_norm(x, x, mx.ones(256), 1e-6), normal(1, 8, 256)),
    "gated_norm": lambda: (lambda x: gated_norm(x, x, mx.ones(256), 1e-6, groups=2), normal(1, 8, 512)),
    "router_topk": lambda: (lambda x: router_topk(x, 4), normal(1, 8, 64)),
}


def repeated(x: Any, rows: int) -> Any:
    """So many equal rows in place of one, as views; parameters have none, their first axis is longer."""
    if isinstance(x, mx.array):
        return np.broadcast_to(np.array(x), (rows, *x.shape[1:])) if x.shape[0] == 1 else x
    if isinstance(x, tuple):
        return tuple(repeated(z, rows) for z in x)
    if isinstance(x, (Arguments, Projected, Replayed, Tape, TimeMix)):
        return replace(x, **{f.name: repeated(getattr(x, f.name), rows) for f in fields(x)})
    return x


@contextmanager
def recorded(rows: int = 1) -> Iterator[list[Any]]:
    """The outputs of all kernels; of more than one row only the threadgroups of the last one run."""
    outputs: list[Any] = []
    make = kernels.kernel

    def recording(*args: Any) -> Any:
        run = make(*args)

        def wrapped(**call: Any) -> Any:
            groups = prod(-(-n // min(n, size)) for n, size in zip(call["grid"], call["threadgroup"], strict=True))
            results = run(**call, **({} if rows == 1 else {"last": -(-groups // rows)}))
            outputs.extend(results)
            return results

        return wrapped

    with mock.patch.object(kernels, "kernel", recording):
        yield outputs


def same_bits_far_away(kernel: Callable[[Any], Any], x: Any) -> bool:
    with recorded() as near:
        kernel(x)
    rows = 1 + FAR // min(z.size for z in near)
    with recorded(rows) as far:
        kernel(repeated(x, rows))
    assert len(near) == len(far) and all(z.size > FAR for z in far)
    return all(np.array_equal(last_row(z, np.array(one)), one) for z, one in zip(far, near, strict=True))


def last_row(z: Any, one: Any) -> Any:
    """Of the axis that has more than one row."""
    (axis,) = (a for a, (n, m) in enumerate(zip(z.shape, one.shape, strict=True)) if n != m)
    return np.take(z, [-1], axis=axis)


@pytest.mark.parametrize("name", CALLS)
def test_outputs(name: str) -> None:
    assert same_bits_far_away(*CALLS[name]())


def narrowed(monkeypatch: pytest.MonkeyPatch, type_: str) -> None:
    """Kernels whose offsets are computed in 32 bits."""
    wide = kernels.source
    monkeypatch.setattr(kernels, "source", lambda *files: wide(*files).replace("int64_t(", f"{type_}("))


@pytest.mark.parametrize("type_", ["int", "uint"])
def test_offsets_of_32_bits_are_noticed(monkeypatch: pytest.MonkeyPatch, type_: str) -> None:
    call = CALLS["scan"]()
    narrowed(monkeypatch, type_)
    with emulated():
        if type_ == "uint":  # wraps around: the last row is written elsewhere
            assert not same_bits_far_away(*call)
        else:
            with pytest.raises(MslError, match="overflow"):
                same_bits_far_away(*call)
