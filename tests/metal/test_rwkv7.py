"""RWKV-7's time mixing in one dispatch against its definition in plain operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxlin.backend import mx
from mlxlin.metal.rwkv7 import longest, time_mix
from mlxlin.models import Model
from mlxlin.recurrences import rwkv7
from mlxlin.recurrences.rwkv7 import complaint, mix, sample
from tests.tiny import RWKV7, tiny_model

from .cases import TOLERANCE, error, float64
from .conftest import emulated
from .measure import launches_of


@pytest.mark.parametrize(
    ("heads", "K", "tokens", "dtype"),
    [(3, 64, 1, mx.bfloat16), (2, 32, 3, mx.float32), (1, 128, 2, mx.float16)],
    ids=str,
)
def test_time_mix_equals_operations(heads: int, K: int, tokens: int, dtype: mx.Dtype) -> None:
    assert complaint(sample(heads, K, tokens, dtype)) == ""


def test_rows_of_different_lengths() -> None:
    x = sample(2, 64, 3, mx.float32)
    (y, S), (expected, S_expected) = time_mix(replace(x, lengths=mx.array([1, 0]))), mix(x)
    assert error(y[:1, :1], float64(expected[:1, :1])) < TOLERANCE[mx.float32]
    assert mx.all(y[:1, 1:] == 0) and mx.all(y[1] == 0)
    assert mx.array_equal(S[1], x.S[1])
    one = mix(replace(x, lengths=mx.array([1, 0])))[1]
    assert error(S, float64(one)) < TOLERANCE[mx.float32] < error(S, float64(S_expected))


def test_one_token_at_a_time_equals_all_at_once_whatever_the_schedule() -> None:
    x = sample(2, 32, 3, mx.float32)
    whole, S = time_mix(x), x.S
    for t in range(3):
        token = {name: getattr(x, name)[:, t : t + 1] for name in ("r", "k", "v", "gate", "decay", "rate")}
        y, S = time_mix(replace(x, **token, S=S))
        assert mx.array_equal(y, whole[0][:, t : t + 1])
    assert mx.array_equal(S, whole[1])
    for options in ({"order": 3}, {"order": 5}, {"order": 6}, {"metal": 410, "align": 1}):
        with emulated(**options):
            assert all(mx.array_equal(a, b) for a, b in zip(time_mix(x), whole, strict=True))


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
