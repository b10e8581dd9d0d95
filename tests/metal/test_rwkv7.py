"""RWKV-7's time mixing in one dispatch against its definition in plain operations."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import replay
from mlxlin.metal.rwkv7 import TimeMix, longest, time_mix
from mlxlin.models import Model
from mlxlin.models.mixers.rwkv7 import token_shift
from mlxlin.recurrences import rwkv7
from mlxlin.recurrences.rwkv7 import complaint, mix, sample
from tests.tiny import RWKV7, tiny_model

from .cases import TOLERANCE, error, float64
from .conftest import emulated
from .measure import launches_of

PER_TOKEN = ("r", "k", "v", "gate", "decay", "rate")
SCHEDULES: tuple[dict[str, int], ...] = ({"order": 3}, {"order": 5}, {"order": 6}, {"metal": 410, "align": 1})


def part(x: TimeMix, start: int, end: int) -> TimeMix:
    """Some of its tokens."""
    return replace(x, **{name: getattr(x, name)[:, start:end] for name in PER_TOKEN})


def same_bits(found: Any, expected: Any) -> bool:
    """Whether the arrays of two results are equal, but for those that are not expected."""
    names = [f.name for f in fields(expected) if isinstance(getattr(expected, f.name), mx.array)]
    return all(mx.array_equal(getattr(found, name), getattr(expected, name)) for name in names)


@pytest.mark.parametrize(
    ("heads", "K", "tokens", "dtype"),
    [(3, 64, 1, mx.bfloat16), (2, 32, 3, mx.float32), (1, 128, 2, mx.float16)],
    ids=str,
)
def test_time_mix_equals_operations(heads: int, K: int, tokens: int, dtype: mx.Dtype) -> None:
    assert complaint(sample(heads, K, tokens, dtype)) == ""


def test_rows_of_different_lengths() -> None:
    x = sample(2, 64, 3, mx.float32)
    mixed, (expected, S_expected) = time_mix(replace(x, lengths=mx.array([1, 0]))), mix(x)
    y, S = mixed.y, mixed.S
    assert error(y[:1, :1], float64(expected[:1, :1])) < TOLERANCE[mx.float32]
    assert mx.all(y[:1, 1:] == 0) and mx.all(y[1] == 0)
    assert mx.array_equal(S[1], x.S[1])
    one = mix(replace(x, lengths=mx.array([1, 0])))[1]
    assert error(S, float64(one)) < TOLERANCE[mx.float32] < error(S, float64(S_expected))


def test_one_token_at_a_time_equals_all_at_once_whatever_the_schedule() -> None:
    x = sample(2, 32, 3, mx.float32)
    whole, S = time_mix(x), x.S
    for t in range(3):
        one = time_mix(replace(part(x, t, t + 1), S=S))
        assert mx.array_equal(one.y, whole.y[:, t : t + 1])
        S = one.S
    assert mx.array_equal(S, whole.S)
    for options in SCHEDULES:
        with emulated(**options):
            assert same_bits(time_mix(x), whole)


@pytest.mark.parametrize(
    ("heads", "K", "tokens", "dtype"),
    [
        (2, 64, 5, mx.bfloat16),
        (3, 32, 3, mx.float32),
        (1, 96, 2, mx.float32),
        (1, 128, 2, mx.float16),
        (1, 192, 1, mx.bfloat16),
        (1, 256, 2, mx.float16),
    ],
    ids=str,
)
def test_replaying_a_tape_gives_the_bits_of_the_accepted_tokens(
    heads: int, K: int, tokens: int, dtype: mx.Dtype
) -> None:
    x = sample(heads, K, tokens, dtype)
    verified = time_mix(x, tape=True)
    assert verified.tape is not None and same_bits(verified, time_mix(x))
    for accepted in range(tokens + 1):
        counts = (accepted, tokens - accepted)
        replayed = replay(x.spec, x.S, verified.tape, mx.array(counts))
        for row, n in enumerate(counts):
            expected = time_mix(part(x, 0, n)).S if n else x.S
            assert mx.array_equal(replayed[row], expected[row])


def test_a_tape_of_rows_of_different_lengths() -> None:
    x = replace(sample(2, 64, 4, mx.bfloat16), lengths=mx.array([4, 1]))
    spoilt = {name: getattr(x, name).at[1, 1:].add(mx.nan) for name in PER_TOKEN}
    verified = time_mix(replace(x, **spoilt), tape=True)
    assert verified.tape is not None and same_bits(verified, time_mix(x))
    for counts in ([4, 4], [4, 1]):  # past its last real token a row stays as it is
        assert mx.array_equal(replay(x.spec, x.S, verified.tape, mx.array(counts)), verified.S)
    replayed = replay(x.spec, x.S, verified.tape, mx.array([2, 0]))
    assert mx.array_equal(replayed, time_mix(replace(x, lengths=mx.array([2, 0]))).S)


def test_a_tape_does_not_depend_on_the_schedule() -> None:
    x = sample(2, 32, 3, mx.float16)
    tape = time_mix(x, tape=True).tape
    for options in SCHEDULES:
        with emulated(**options):
            assert same_bits(time_mix(x, tape=True).tape, tape)


def test_the_token_shift_goes_back_with_the_inputs() -> None:
    x, memory = mx.random.normal((2, 3, 8)), mx.random.normal((2, 1, 8))
    for accepted in range(4):
        _, shift = token_shift(x, memory, mx.full((2,), accepted))
        assert mx.array_equal(shift, token_shift(x[:, :accepted], memory, None)[1] if accepted else memory)


def test_the_longest_call_fits() -> None:
    x = sample(1, 256, longest(256), mx.float32)
    assert complaint(x) == ""


def logits(model: Model) -> list[mx.array]:
    tokens = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    first, state = model(tokens[:, :4])
    return [first, model(tokens[:, 4:], state)[0]]


def test_a_model_gives_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(RWKV7 | {"head_dim": 32})
    plain = logits(model)
    monkeypatch.setattr(rwkv7, "on_metal", lambda: True)
    monkeypatch.setattr(rwkv7, "trusted_by_key", lambda *_: True)
    found: list[mx.array] = []
    launches = launches_of(lambda: found.extend(logits(model)))
    assert {launch.name for launch in launches} == {"time_mix"}
    for a, b in zip(found, plain, strict=True):
        assert float(mx.abs(a - b).max()) < 1e-4 * float(mx.abs(b).max())
