"""Both inverses of (I + A) where a series would explode: keys that point almost the same way, and beta up to 2."""

from __future__ import annotations

import numpy as np
import pytest
from recurrence_problems import assert_matches, error, make

from mlxlin.backend import mx
from mlxlin.recurrences.inverse import lapack, substituted, unit_lower_inverse
from mlxlin.recurrences.run import LONGEST_CHUNK

METHODS = {"LAPACK": lapack, "substitution": substituted, "by device": unit_lower_inverse}


def system(C: int, cosine: float, beta: float, seed: int = 0) -> np.ndarray:
    """tril(beta K K^T, -1) of unit keys with pairwise cosine about `cosine`, float32 [3, C, C]."""
    rng = np.random.default_rng(seed)
    keys, common = rng.standard_normal((3, C, 64)), rng.standard_normal((3, 1, 64))
    keys, common = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (keys, common))
    keys = np.sqrt(1 - cosine) * keys + np.sqrt(cosine) * common
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.tril(beta * keys @ keys.swapaxes(-1, -2), -1).astype(np.float32)


@pytest.mark.parametrize("C", [16, 32, LONGEST_CHUNK])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 2.0])
@pytest.mark.parametrize("cosine", [0.0, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("method", METHODS)
def test_inverse(method: str, cosine: float, beta: float, C: int) -> None:
    A = system(C, cosine, beta)
    got = METHODS[method](mx.array(A))
    assert error(got, np.linalg.inv(np.eye(C) + A.astype(np.float64))) < 3e-6
    assert bool(mx.array_equal(got, mx.tril(got)))


@pytest.mark.parametrize("C", [32, 64])
def test_a_series_would_not_do(C: int) -> None:
    """The systems above can tell: the doubling (I - A)(I + A^2)(I + A^4)... fails on them."""
    A = mx.array(system(C, 0.9, 1.9))
    want = np.linalg.inv(np.eye(C) + np.array(A).astype(np.float64))
    X, power = mx.eye(C) - A, A @ A
    for _ in range(C.bit_length() - 2):
        X, power = X + X @ power, power @ power
    assert np.abs(np.array(X) - want).max() > 1e-2


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 2.0])
@pytest.mark.parametrize("cosine", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("rule", ["delta", "gated_delta", "kda", "delta_product"])
def test_correlated_keys_through_the_whole_recurrence(rule: str, cosine: float, beta: float) -> None:
    """Within the tolerance even at beta = 2 exactly, where nothing contracts: an error of A stays forever."""
    for seed in range(3):
        problem = make(rule, B=1, T=140, H=1, K=64, gates="slow", cosine=cosine, beta=beta, seed=seed)
        for chunk in (16, 32, 64):
            assert_matches(problem, problem.run(chunk=chunk))


def test_the_path_without_lapack_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs, run here."""
    from mlxlin.recurrences import chunkwise

    problem = make("gated_delta", T=140, cosine=0.99, beta=1.9)
    usual, _ = problem.run(chunk=32)
    monkeypatch.setattr(chunkwise, "unit_lower_inverse", substituted)
    monkeypatch.setattr(chunkwise, "widest", lambda: mx.float32)
    got = problem.run(chunk=32)
    assert_matches(problem, got)
    assert error(got[0], usual) < 1e-5
