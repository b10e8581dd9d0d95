"""The two-kernel chunk-parallel prefill against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.metal.recurrence import chunk, scan
from mlxlin.recurrences.kernels import CHUNKED

from .cases import Case, arguments, assert_equals_reference

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 65, 257)

CASES = [
    Case("linear", T=18, K=96, V=64, groups=3, dtype=mx.bfloat16, keys="correlated"),
    Case("decay", T=35, B=2, K=64, V=96, groups=4, gates="mixed", strided=True, lengths=(35, 16)),
    Case("decay", T=18, H=2, K=128, V=64, groups=10, gates="mixed"),
    Case("decay", T=35, B=3, H=8, K=128, V=80, groups=16, dtype=mx.bfloat16, gates="mixed"),
    Case("kda", T=35, K=64, V=80, gates="mixed", keys="correlated"),
    Case("delta", T=40, K=128, V=32, groups=1, keys="correlated", beta=2.0),
    Case(
        "gated_delta", T=33, B=3, K=192, V=64, dtype=mx.float16, gates="mixed", keys="correlated", lengths=(0, 31, 33)
    ),
    Case("gated_delta", T=20, H=2, K=256, V=32, dtype=mx.bfloat16, strided=True),
    Case("delta_product", T=11, B=2, substeps=3, lengths=(11, 1), gates="mixed", keys="correlated", strided=True),
    Case("delta_product", T=13, decay="none", substeps=2, keys="correlated", beta=1.9),
    Case("gated", T=33, B=3, H=2, groups=1, K=64, gates="mixed", lengths=(0, 17, 33), dtype=mx.bfloat16),
    Case("kda", T=36, K=96, V=64, groups=3, gates="mixed", keys="correlated", beta=2.0, strided=True),
    Case("dplr", T=33, B=2, K=64, V=64, groups=1, gates="mixed", keys="correlated", lengths=(3, 33)),
    Case("decay", T=18, V=512, groups=1, gates="mixed"),
    Case("comba", T=20, groups=2, gates="mixed", keys="correlated"),
    Case("dplr", T=17, decay="head", groups=4, dtype=mx.float16, strided=True),
]


def assert_chunk_equals_reference(case: Case) -> None:
    x = case.inputs()
    y, S = chunk(arguments(x))
    assert_equals_reference(x, y, S)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunk_equals_reference(case: Case) -> None:
    assert_chunk_equals_reference(case)


@pytest.mark.parametrize("rule", ["decay", "gated", "gated_delta", "kda", "dplr"])
def test_b31_every_length_gives_the_state_of_its_last_token(rule: str) -> None:
    for T in LENGTHS:
        for gates in ("mild", "mixed"):
            assert_chunk_equals_reference(Case(rule, T=T, gates=gates, keys="correlated", seed=T))


@pytest.mark.parametrize("rule", ["delta", "gated_delta", "kda"])
def test_nothing_contracts(rule: str) -> None:
    """Keys that are alike and beta = 2: every error of the systems stays, multiplied by their condition."""
    for seed in range(3):
        assert_chunk_equals_reference(Case(rule, T=140, K=64, gates="slow", keys="alike", beta=2.0, seed=seed))


@pytest.mark.parametrize("rule", ["gated_delta", "kda"])
def test_b33_a_sequence_equals_its_parts(rule: str) -> None:
    x = Case(rule, T=48, gates="mixed").inputs()
    whole = arguments(x)
    for split in (1, 16, 29):
        S, outputs = x.S, []
        for part in (slice(0, split), slice(split, 48)):
            cut = {name: getattr(whole, name)[:, part] for name in ("q", "k", "v", "g", "beta")}
            y, S = chunk(replace(whole, **cut, S=S))
            outputs.append(y)
        assert_equals_reference(x, mx.concatenate(outputs, axis=1), S)


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [(chunk, "gated_delta"), (scan, "gated_delta"), (scan, "gated_values")],
    ids=["chunk", "scan", "scan-values"],
)
def test_b39_a_row_of_a_padded_batch_has_the_bits_of_the_row_alone(kernel: Callable[..., Any], rule: str) -> None:
    padded = arguments(Case(rule, T=35, B=3, lengths=(35, 18, 0), gates="mixed").inputs())
    y, S, *_ = kernel(padded)
    for i, n in enumerate((35, 18)):
        given = (name for name in ("q", "k", "v", "g", "beta") if getattr(padded, name) is not None)
        row = {name: getattr(padded, name)[i : i + 1, :n] for name in given}
        y_alone, S_alone, *_ = kernel(replace(padded, **row, S=padded.S[i : i + 1], lengths=None))
        assert mx.array_equal(y[i, :n], y_alone[0]) and mx.array_equal(S[i], S_alone[0])
        assert mx.all(y[i, n:] == 0)
    assert padded.S is not None and mx.array_equal(S[2], padded.S[2])


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("rule", ["gated_delta", "dplr"])
def test_several_columns_of_matrices_per_group(rule: str, columns: int) -> None:
    x = Case(rule, T=21, V=64, groups=1, gates="mixed", keys="correlated").inputs()
    assert_equals_reference(x, *chunk(arguments(x), columns=columns))


@pytest.mark.parametrize("rule", ["decay", "gated", "gated_values"])
def test_a_constant_slow_decay_does_not_drift(rule: str) -> None:
    """exp(-1e-4) rounded in the same way 8,192 times is off by 1e-4."""
    x = Case(rule, T=8192, groups=1).inputs()
    assert x.g is not None
    x = replace(x, g=mx.full(x.g.shape, -1e-4))
    for kernel in (chunk, scan) if x.decay in CHUNKED else (scan,):
        assert_equals_reference(x, *kernel(arguments(x)))
