"""Wrong arguments are named, in words; nothing is looked at that would end laziness."""

from __future__ import annotations

from typing import Any

import pytest
from recurrence_problems import RULE_NAMES, make

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.recurrences import RULES, paths, reference, run
from mlxlin.recurrences.rules import check


def call(rule: str = "gated_delta", **changes: Any) -> None:
    problem = make(rule, T=4, H=2, HV=4, K=8, V=6).with_(**changes)
    problem.run()


@pytest.mark.parametrize(
    "rule, changes, words",
    [
        ("gated_delta", {"q": mx.zeros((2, 4, 16))}, "q has shape"),
        ("gated_delta", {"k": mx.zeros((2, 4, 2, 9))}, "k has shape"),
        ("gated_delta", {"k": mx.zeros((2, 5, 2, 8))}, "k has shape"),
        ("gated_delta", {"v": mx.zeros((2, 5, 4, 6))}, "v (2, 5, 4, 6) and k"),
        ("gated_delta", {"v": mx.zeros((2, 4, 3, 6))}, "3 value heads do not divide over 2 key heads"),
        ("gated_delta", {"g": None}, "gated_delta needs g"),
        ("gated_delta", {"beta": None}, "gated_delta needs beta"),
        ("gated_delta", {"beta": mx.zeros((2, 4, 2))}, "beta has shape"),
        ("gated_delta", {"g": mx.zeros((2, 4, 4, 8))}, "g has shape"),
        ("gated_delta", {"g": mx.zeros((2, 4, 4), mx.bfloat16)}, "rounds to 1"),
        ("gated_delta", {"state": mx.zeros((2, 4, 8, 6))}, "state has shape"),
        ("gated_delta", {"state": mx.zeros((2, 4, 6, 8), mx.bfloat16)}, "state is mlx.core.bfloat16"),
        ("gated_delta", {"lengths": mx.zeros((3,), mx.int32)}, "lengths has shape"),
        ("gated_delta", {"lengths": mx.zeros((2,))}, "lengths is mlx.core.float32"),
        ("gated_delta", {"q": mx.zeros((2, 4, 2, 8), mx.int32)}, "q is mlx.core.int32"),
        ("gated_delta", {"a": mx.zeros((2, 4, 2, 8))}, "gated_delta takes no a"),
        ("gated_delta", {"normalize": True}, "has no normaliser"),
        ("gated_delta", {"chunk": 48}, "chunk is 48"),
        ("gated_delta", {"chunk": 8}, "chunk is 8"),
        ("kda", {"g": mx.zeros((2, 4, 4))}, "g has shape"),
        ("linear", {"g": mx.zeros((2, 4, 4))}, "linear takes no g"),
        ("linear", {"beta": mx.zeros((2, 4, 4))}, "linear takes no beta"),
        ("linear", {"normalize": True}, "state is one array"),
        ("linear", {"lengths": [4, 1]}, "lengths is list"),
        ("linear", {"q": None}, "q is NoneType"),
        ("delta", {"beta": 1.0}, "beta is float"),
        ("dplr", {"a": None}, "dplr needs a"),
        ("comba", {"a": None}, "comba needs a"),
        ("dplr", {"b": mx.zeros((2, 4, 4, 8))}, "b has shape"),
        ("delta_product", {"k": mx.zeros((2, 7, 2, 8))}, "k has shape"),
        ("delta_product", {"k": mx.zeros((2, 0, 2, 8)), "v": mx.zeros((2, 0, 4, 6))}, "0 sub-tokens for 4 tokens"),
    ],
)
def test_wrong_arguments(rule: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        call(rule, **changes)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_misspelt_rule_is_answered_with_the_nearest() -> None:
    x = mx.zeros((1, 1, 1, 4))
    with pytest.raises(InputError, match="no recurrence rule 'gated_detla'") as caught:
        run("gated_detla", x, x, x)
    assert caught.value.hint == "Did you mean 'gated_delta'?"
    with pytest.raises(InputError) as caught:
        run("transformer", x, x, x)
    assert all(rule in caught.value.hint for rule in RULES)


def test_the_table_is_complete_and_read_only() -> None:
    additive = {"linear", "decay", "gated", "gated_values"}
    assert set(RULES) == additive | {"delta", "gated_delta", "comba", "kda", "delta_product", "dplr"}
    assert all(rule.name == name and "arXiv" in rule.source for name, rule in RULES.items())
    with pytest.raises(TypeError):
        RULES["linear"] = RULES["delta"]  # type: ignore[index]


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_no_tokens_and_no_rows(rule: str) -> None:
    problem = make(rule, T=3)
    y, S = problem.tokens(0, 0).run(state=problem.rest["state"])
    assert y.shape == (2, 0, 4, 24) and y.dtype == problem.v.dtype
    assert bool(mx.array_equal(S, problem.rest["state"]))
    y, S = problem.rows(0, 0).run()
    assert y.shape == (0, 3, 4, 24) and S.shape == (0, 4, 24, 32)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_no_state_is_a_zero_state(rule: str) -> None:
    problem = make(rule, T=20)
    y, S = problem.run(state=None)
    y0, S0 = problem.run(state=mx.zeros_like(problem.rest["state"]))
    assert bool(mx.array_equal(y, y0)) and bool(mx.array_equal(S, S0))


def test_paths_can_be_printed() -> None:
    rows = paths.table()
    assert [row["path"] for row in rows if row["device"] == "any"] == [p.name for p in paths.PATHS if p.takes is None]
    assert all(set(row) == {"path", "device", "decay", "tokens", "heads"} for row in rows)


def test_the_paths_of_a_mac_say_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "on_metal", lambda: True)
    chunks, tokens, *_ = paths.table()
    assert chunks["heads"] == "K 32 to 256, V to 512, no normaliser" and tokens["heads"] == "K 32 to 256, V to 512"


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_every_call_has_a_path(rule: str) -> None:
    """Steps for a few tokens, chunks for many or where a chunk length is named."""
    for T in (1, 2, 3, 16, 5000):
        problem = make(rule, B=1, T=T, H=1, K=8, V=8)
        x = check(rule, problem.q, problem.k, problem.v, **problem.rest)
        name = paths.choose(x).name
        assert name == ("step" if T <= 3 else "chunkwise")
        assert paths.choose(x, chunk=64).name == "chunkwise"


def test_a_large_state_has_longer_chunks() -> None:
    for size, chunk in ((32, 32), (128, 32), (256, 64)):
        problem = make("delta", B=1, T=1, H=1, HV=1, K=size, V=size)
        assert paths.chunk_length(check("delta", problem.q, problem.k, problem.v, **problem.rest)) == chunk


def test_scan_checks_like_run() -> None:
    with pytest.raises(InputError, match="needs g"):
        problem = make("decay", T=2)
        reference.scan("decay", problem.q, problem.k, problem.v)
