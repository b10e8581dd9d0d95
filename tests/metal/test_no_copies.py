"""Kernels read the projections where they are: nothing is copied on the way to a dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.metal import kernels as metal
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.mixer import Projected, longest
from mlxlin.recurrences import RULES, kernels, run, rwkv7
from mlxlin.recurrences.mixer import by_kernels

from .cases import Case
from .test_decode import SPECS, Call
from .test_layers import normal

Span = tuple[int, int]
PROJECTIONS = ("qkv", "decay", "beta", "a", "b", "gate")


def span(x: mx.array) -> Span:
    """The addresses of its first element and of the end of its last."""
    bits = {2: mx.uint16, 4: mx.uint32}
    raw = np.asarray(memoryview(x.view(bits[x.itemsize])))
    first = raw.__array_interface__["data"][0]
    return first, first + sum((n - 1) * stride for n, stride in zip(raw.shape, raw.strides, strict=True)) + x.itemsize


@contextmanager
def copies_found(given: Sequence[mx.array]) -> Iterator[list[str]]:
    """Names of the inputs of kernels that lie neither in given arrays nor in what kernels made; nothing runs."""
    made, copies = list(given), []  # kept, so that no address is used again

    def kernel(name: str, inputs: tuple[str, ...], *_: Any) -> Callable[..., list[mx.array]]:
        def call(*, output_shapes: Sequence[Any], output_dtypes: Sequence[mx.Dtype], **call: Any) -> list[mx.array]:
            homes = [span(x) for x in made]
            for part, x in zip(inputs, call["inputs"], strict=True):
                if isinstance(x, mx.array) and x.size:
                    first, end = span(x)
                    if not any(start <= first and end <= stop for start, stop in homes):
                        copies.append(f"{part} of {name}")
            outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            mx.eval(outputs)
            made.extend(outputs)
            return outputs

        return call

    mx.eval(made)
    with mock.patch.object(metal, "kernel", kernel):
        yield copies


def side_by_side(x: Projected) -> tuple[Projected, list[mx.array]]:
    """The same with its projections as slices of one array, as merged products leave them, and all arrays there are."""
    parts = {name: getattr(x, name) for name in PROJECTIONS if getattr(x, name) is not None}
    flat = [z for part in parts.values() for z in (part if isinstance(part, tuple) else (part,))]
    dtype = x.first.dtype
    whole = mx.concatenate([z for z in flat if z.dtype == dtype], axis=-1)
    start = 0

    def moved(z: Any) -> Any:
        nonlocal start
        if isinstance(z, tuple):
            return tuple(map(moved, z))
        if z.dtype != dtype:
            return z
        start += z.shape[-1]
        return whole[..., start - z.shape[-1] : start]

    others = [z for f in fields(x) if f.name not in parts and isinstance(z := getattr(x, f.name), mx.array)]
    found = replace(x, **{name: moved(part) for name, part in parts.items()})
    return found, [whole, *others, *(z for z in flat if z.dtype != dtype)]


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """None: nothing runs. `run` takes its kernels."""
    monkeypatch.setattr(kernels, "on_metal", lambda: True)
    monkeypatch.setattr(kernels, "trusted", lambda *_: True)


@pytest.mark.parametrize("many", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", SPECS)
def test_mixers(name: str, many: bool) -> None:
    spec = SPECS[name]
    spec, x = Call(name, T=max(33, longest(spec, 2) + 1) if many else 2, B=2, dtype=mx.bfloat16).projected()
    x, arrays = side_by_side(x)
    with copies_found(arrays) as copies:
        by_kernels(spec, x)
    # between its recurrences gated slot attention has a softmax
    assert copies == (["q of prep_channel"] if many and spec.slots else [])


@pytest.mark.parametrize("rule", [name for name in RULES if name != "comba"])  # of its gates products are made first
@pytest.mark.parametrize("T", [5, 40])
def test_recurrences(rule: str, T: int) -> None:
    x = Case(rule, T=T, B=2, H=2, strided=True, lengths=(T, 3)).inputs()
    given = {name: z for name in ("q", "k", "v", "g", "beta", "a", "b") if (z := getattr(x, name)) is not None}
    with copies_found([*given.values(), x.S, x.lengths]) as copies:
        run(rule, **given, state=x.S, lengths=x.lengths)
    assert copies == []


@pytest.mark.parametrize("T", [2, 40])
def test_rwkv7(T: int) -> None:
    x = rwkv7.sample(2, 64, T, mx.bfloat16)
    names = ("r", "k", "v", "gate", "decay", "rate")
    whole = mx.concatenate([getattr(x, name) for name in names], axis=-1)
    x = replace(x, **dict(zip(names, mx.split(whole, len(names), axis=-1), strict=True)))
    with copies_found([whole, *(z for f in fields(x) if isinstance(z := getattr(x, f.name), mx.array))]) as copies:
        rwkv7.by_kernels(x)
    assert copies == []


def test_what_stands_between_mixers() -> None:
    wide, weight, logits = normal(2, 3, 128), normal(64, seed=1), normal(2, 3, 80)
    with copies_found([wide, weight, logits]) as copies:
        add_norm(wide[..., :64], wide[..., 64:], weight, 1e-6)
        gated_norm(
            wide[..., :64], wide[..., 64:], weight, 1e-6, activation="silu", v=wide[..., :64].reshape(2, 3, 2, 32)
        )
        router_topk(logits[..., 8:72], 4)
    assert copies == []


def test_a_copy_is_noticed() -> None:
    x = normal(2, 3, 128)
    with copies_found([x]) as copies:
        add_norm(x[..., :64], mx.contiguous(x[..., 64:]), x[0, 0, :64], 1e-6)
    assert ["residual"] == [copy.split()[0] for copy in copies]
