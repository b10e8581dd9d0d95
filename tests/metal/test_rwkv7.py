"""RWKV-7's time mixing, in one dispatch or with its recurrence apart, against its definition in plain operations."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import replay
from mlxlin.metal.rwkv7 import TimeMix, longest, prepare, time_mix
from mlxlin.models import Model
from mlxlin.models.mixers.rwkv7 import token_shift
from mlxlin.recurrences import kernels, rwkv7
from mlxlin.recurrences.rwkv7 import by_kernels, complaint, in_float32, mix, sample
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


@pytest.mark.parametrize(
    ("heads", "K", "tokens", "dtype"),
    [
        (3, 64, 22, mx.bfloat16),
        (2, 32, 17, mx.float32),
        (2, 64, 33, mx.float32),
        (1, 128, 40, mx.float16),
        (1, 256, 6, mx.bfloat16),
    ],
    ids=str,
)
def test_a_prompt_by_kernels_equals_operations(
    heads: int, K: int, tokens: int, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "on_metal", lambda: True)
    monkeypatch.setattr(kernels, "trusted", lambda *_: True)
    x = sample(heads, K, tokens, dtype)
    names = [launch.name for launch in launches_of(lambda: by_kernels(x))]
    recurrence = ["prep_channel", "chunk"] if tokens >= 32 else ["scan"]
    assert names == ["time_mix_prefill", *recurrence, "time_mix_finish"]
    assert complaint(x) == ""


def test_a_prompt_of_strided_inputs_and_rows_of_different_lengths() -> None:
    """As slices of wider arrays and with NaN for padding, which no kernel reads."""
    x, lengths = sample(2, 64, 19, mx.float32), mx.array([19, 5])
    padding = mx.arange(19)[:, None] >= lengths[:, None, None]
    spoilt = {name: mx.where(padding, mx.nan, getattr(x, name)) for name in PER_TOKEN}
    strided = {name: mx.stack([z, z], axis=-1)[..., 1] for name, z in spoilt.items()}
    found, (y, S) = by_kernels(replace(x, **strided, lengths=lengths)), mix(replace(x, lengths=lengths))
    assert mx.all(found.y[1, 5:] == 0)
    assert error(found.y[0], float64(y[0])) < TOLERANCE[mx.float32]
    assert error(found.y[1, :5], float64(y[1, :5])) < TOLERANCE[mx.float32]
    assert error(found.S, float64(S)) < TOLERANCE[mx.float32]


def test_a_prompt_does_not_depend_on_the_schedule() -> None:
    x = in_float32(sample(2, 32, 17, mx.float16))
    found, ready = by_kernels(x), prepare(x)
    for options in SCHEDULES:
        with emulated(**options):
            assert same_bits(by_kernels(x), found)
            assert all(mx.array_equal(getattr(prepare(x), name), getattr(ready, name)) for name in "kgab")


def test_the_longest_call_fits() -> None:
    x = sample(1, 256, longest(256), mx.float32)
    assert complaint(x) == ""


def logits(model: Model, prompt: int) -> list[mx.array]:
    """Of a prompt and of the token behind it."""
    tokens = mx.random.randint(0, 32, (2, prompt + 1), key=mx.random.key(5))
    first, state = model(tokens[:, :prompt])
    return [first, model(tokens[:, prompt:], state)[0]]


@pytest.mark.parametrize("prompt", [4, 18])
def test_a_model_gives_the_same_logits(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(RWKV7 | {"head_dim": 32})
    plain = logits(model, prompt)
    monkeypatch.setattr(rwkv7, "on_metal", lambda: True)
    monkeypatch.setattr(rwkv7, "trusted_by_key", lambda *_: True)
    found: list[mx.array] = []
    launches = launches_of(lambda: found.extend(logits(model, prompt)))
    around = {"time_mix_prefill", "time_mix_finish"} if prompt > 16 else set()
    assert {launch.name for launch in launches} == {"time_mix", *around}
    for a, b in zip(found, plain, strict=True):
        assert float(mx.abs(a - b).max()) < 1e-4 * float(mx.abs(b).max())
