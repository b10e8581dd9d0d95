"""Addresses beyond 2^31 elements: kernels on inputs whose tokens, heads or rows lie that far apart.

The memory between them is reserved but never touched, so gigabytes cost nothing; the emulator reports every access
that is not to an element. The same numbers side by side must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from mlxlin.backend import mx
from mlxlin.metal.decode import decode, replay
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.mixer import Tape
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import Arguments, chunk, scan
from mlxlin.metal.rwkv7 import finish, prepare, time_mix
from mlxlin.recurrences.rwkv7 import sample
from tests.msl.arrays import untouched

from .cases import Case, arguments
from .test_decode import Call
from .test_layers import normal

FAR = {
    "qkv": 1,
    "memory": 0,
    "decay": 1,
    "beta": 0,
    "gate": 1,
    "cos": 1,
    "S": 2,
}  # inputs of a mixer, and along which axis
BEYOND = 2**31 + 2**20  # elements from the first to the last; a 32-bit offset would be negative


def spread(x: mx.array, axis: int) -> Any:
    """The same numbers as numpy array, the indices along `axis` so far apart that the last lies beyond 2^31."""
    array = np.array(x)
    strides = [stride // array.itemsize for stride in array.strides]
    strides[axis] = -(-BEYOND // (array.shape[axis] - 1))
    elements = 1 + sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True))
    memory = np.frombuffer(untouched(elements * array.itemsize), array.dtype)
    far = as_strided(memory, array.shape, [stride * array.itemsize for stride in strides])
    far[...] = array
    assert elements > 2**31
    return far


def far_apart(x: Arguments, axis: int) -> Arguments:
    names = [name for name in ("q", "k", "v", "g", "beta", "a", "b") if getattr(x, name) is not None]
    return replace(x, **{name: spread(getattr(x, name), axis) for name in names})


def equal(found: Any, expected: Any) -> Iterator[bool]:
    return (bool(mx.array_equal(a, b)) for a, b in zip(found, expected, strict=True) if b is not None)


@pytest.mark.parametrize("axis", [1, 2], ids=["tokens", "heads"])
@pytest.mark.parametrize("rule", ["gated_delta", "dplr"])
@pytest.mark.parametrize("kernel", [scan, chunk])
def test_recurrences(kernel: Any, rule: str, axis: int) -> None:
    x = arguments(Case(rule, T=18, H=2, groups=1, dtype=mx.float16).inputs())
    far = far_apart(x, axis)
    assert all(equal(kernel(far), kernel(x)))


def test_states_and_rows_of_a_batch() -> None:
    x = arguments(Case("kda", T=17, B=3, groups=2, dtype=mx.float16).inputs())
    assert x.S is not None
    far = replace(far_apart(x, 0), S=spread(x.S, 1))
    assert all(equal(scan(far), scan(x)))
    assert all(equal(chunk(far), chunk(x)))


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2", "retention-grouped"])
@pytest.mark.parametrize("kernel", [decode, prefill])
def test_mixers(kernel: Any, name: str) -> None:
    spec, x = Call(name, T=3, B=2, dtype=mx.float16).projected()
    changed = {name: spread(getattr(x, name), axis) for name, axis in FAR.items() if getattr(x, name) is not None}
    far, near = kernel(spec, replace(x, **changed)), kernel(spec, x)
    arrays = ("q", "k", "v", "g", "beta", "memory") if kernel is prefill else ("y", "S", "memory")
    assert all(equal((getattr(far, n) for n in arrays), (getattr(near, n) for n in arrays)))


def test_prompts_of_rwkv7() -> None:
    x = sample(2, 32, 3, mx.float16)
    far = replace(x, **{name: spread(getattr(x, name), 1) for name in ("r", "k", "v", "gate", "decay", "rate")})
    k, out = (z.reshape(2, 3, 2, 32) for z in (x.k, x.v))
    ready, expected = prepare(far), prepare(x)
    assert all(equal((getattr(ready, n) for n in "kgab"), (getattr(expected, n) for n in "kgab")))
    assert all(equal([finish(far, spread(k, 0), spread(out, 2))], [finish(x, k, out)]))


def test_what_bypasses_the_recurrence() -> None:
    """Outputs, what is added to them, and gates."""
    y, v, skip = (normal(2, 3, 128, seed=0), normal(2, 3, 4, 32, seed=1), normal(2, 3, 4, 1, seed=2))
    near = gated_norm(y, y, y[0, 0], 1e-5, activation="silu", groups=2, skip=skip, v=v)
    far = gated_norm(spread(y, 1), spread(y, 0), y[0, 0], 1e-5, activation="silu", groups=2, skip=skip, v=spread(v, 1))
    assert mx.array_equal(near, far)


def test_tokens_and_tapes_of_rwkv7() -> None:
    x = sample(2, 32, 3, mx.float16)
    far = replace(
        x, S=spread(x.S, 0), **{name: spread(getattr(x, name), 1) for name in ("r", "k", "v", "gate", "rate")}
    )
    found, expected = time_mix(far, tape=True), time_mix(x, tape=True)
    assert found.tape is not None and expected.tape is not None
    assert all(equal([found.y, found.S], [expected.y, expected.S]))
    assert all(equal(vars(found.tape).values(), vars(expected.tape).values()))
    tape = Tape(**{name: None if z is None else spread(z, 1) for name, z in vars(expected.tape).items()})
    accepted = mx.array([2, 3])
    assert mx.array_equal(replay(x.spec, far.S, tape, accepted), replay(x.spec, x.S, expected.tape, accepted))


def test_what_stands_between_mixers() -> None:
    x, weight, logits = normal(2, 3, 64), normal(64, seed=1), normal(2, 3, 64, seed=2)
    assert all(equal(add_norm(spread(x, 0), spread(x, 1), weight, 1e-6), add_norm(x, x, weight, 1e-6)))
    assert all(equal(router_topk(spread(logits, 1), 4), router_topk(logits, 4)))
