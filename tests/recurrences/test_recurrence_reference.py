"""The definition itself: against each rule's own textbook step, the general form, and the parallel forms."""

from __future__ import annotations

import numpy as np
import pytest
from recurrence_problems import RULE_NAMES, error, make

from mlxlin.backend import mx
from mlxlin.recurrences import reference


def float64(x: mx.array | None) -> np.ndarray:
    return np.array(mx.zeros(1) if x is None else x.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("rule", [rule for rule in RULE_NAMES if rule not in ("delta_product", "gated_values")])
def test_every_rule_is_a_choice_of_w_a_b_u(rule: str) -> None:
    """S <- S (diag(w) + a b^T) + u k^T, y = S q, one head at a time."""
    problem = make(rule, B=1, T=20, H=1, HV=1, K=8, V=5)
    y, S = problem.expected()
    q, k, v = (float64(x)[0, :, 0] for x in (problem.q, problem.k, problem.v))
    g, beta, a, b = (problem.rest.get(name) for name in ("g", "beta", "a", "b"))
    w = np.ones((20, 8)) if g is None else np.exp(float64(g)[0, :, 0].reshape(20, -1)) * np.ones((20, 8))
    u = v
    if beta is not None:
        strength = float64(beta)[0, :, 0, None]
        a, b, u = -strength * (w * k if a is None else float64(a)[0, :, 0]), k, strength * v
    elif a is not None:
        a, b = float64(a)[0, :, 0], float64(b)[0, :, 0]
    else:
        a, b = np.zeros((20, 8)), np.zeros((20, 8))
    state = float64(problem.rest["state"])[0, 0]
    for t in range(20):
        state = state @ (np.diag(w[t]) + np.outer(a[t], b[t])) + np.outer(u[t], k[t])
        assert np.allclose(y[0, t, 0], state @ q[t], rtol=0, atol=1e-12)
    assert np.allclose(S[0, 0], state, rtol=0, atol=1e-12)


def test_gated_values_forget_along_what_they_answer_with() -> None:
    """Each value channel is a decaying recurrence of its own: value heads of width one with one decay each."""
    problem = make("gated_values", H=2, HV=4, T=20, K=8, V=5)
    B, T, HV, V = problem.v.shape
    apart = make("decay").with_(
        q=problem.q,
        k=problem.k,
        v=problem.v.reshape(B, T, HV * V, 1),
        g=problem.rest["g"].reshape(B, T, HV * V),
        state=problem.rest["state"].reshape(B, HV * V, 1, -1),
    )
    for found, expected in zip(problem.expected(), apart.expected(), strict=True):
        assert np.allclose(found, expected.reshape(found.shape), rtol=0, atol=1e-12)


def test_delta_product_is_n_delta_steps_read_after_the_last() -> None:
    product = make("delta_product", B=1, T=6, H=1, HV=2, n=3)
    g = np.zeros((1, 18, 2), np.float32)
    g[:, ::3] = np.array(product.rest["g"])
    steps = product.with_(g=mx.array(g), q=mx.repeat(product.q, 3, axis=1))
    y, S = make("gated_delta").with_(q=steps.q, k=steps.k, v=steps.v, **steps.rest).expected()
    assert np.allclose(product.expected()[0], y[:, 2::3], rtol=0, atol=1e-12)
    assert np.allclose(product.expected()[1], S, rtol=0, atol=1e-12)


def test_value_heads_read_the_key_head_of_their_group() -> None:
    grouped = make("gated_delta", H=2, HV=6, T=9)
    alone = grouped.with_(q=mx.repeat(grouped.q, 3, axis=2), k=mx.repeat(grouped.k, 3, axis=2))
    assert np.allclose(grouped.expected()[0], alone.expected()[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("gates", ["mild", "mixed", "reset"])
def test_masked_attention_is_the_decaying_recurrence(gates: str) -> None:
    problem = make("decay", H=2, HV=2, T=50, gates=gates)
    y, _ = problem.expected(state=None)
    assert error(reference.masked_attention(problem.q, problem.k, problem.v, problem.rest["g"]), y) < 1e-6


def test_masked_attention_without_decay_is_linear_attention() -> None:
    problem = make("linear", H=2, HV=2, T=50)
    y, _ = problem.expected(state=None)
    assert error(reference.masked_attention(problem.q, problem.k, problem.v), y) < 1e-6


def test_the_decay_mask_is_multiplicative() -> None:
    """Added to the scores before a softmax it is another function: rows of L do not sum to 1."""
    problem = make("decay", H=2, HV=2, T=12, gates="mild")
    g = problem.rest["g"]
    mask = reference.decay_mask(12, g)
    assert error(mask[..., 5, 2], np.exp(float64(g)[:, 3:6].sum(axis=1))) < 1e-6
    additive = mx.softmax(mx.where(mx.tri(12) > 0, mx.log(mask), -mx.inf), axis=-1)
    assert not mx.allclose(additive, mask, atol=0.1).item()


def test_without_a_mask_the_product_regroups() -> None:
    problem = make("linear", H=2, HV=2, T=33)
    q, k, v = (float64(x) for x in (problem.q, problem.k, problem.v))
    scores = np.einsum("bthk,bshk->bhts", q, k)
    assert error(reference.regrouped(problem.q, problem.k, problem.v), np.einsum("bhts,bshv->bthv", scores, v)) < 1e-6


def test_softmax_attention() -> None:
    problem = make("linear", H=2, HV=2, T=33)
    q, k, v = (float64(x) for x in (problem.q, problem.k, problem.v))
    scores = np.where(np.tri(33) > 0, np.exp(np.einsum("bthk,bshk->bhts", q, k)), 0)
    want = np.einsum("bhts,bshv->bthv", scores / scores.sum(axis=-1, keepdims=True), v)
    assert error(reference.softmax_attention(problem.q, problem.k, problem.v), want) < 1e-6


def test_scan_has_the_signature_and_the_dtypes_of_run() -> None:
    problem = make("gated_delta", dtype=mx.bfloat16, T=5)
    y, S = reference.scan("gated_delta", problem.q, problem.k, problem.v, **problem.rest, lengths=mx.array([5, 2]))
    assert y.dtype == mx.bfloat16 and S.dtype == mx.float32
    assert bool(mx.all(y[1, 2:] == 0))
    assert error(S[1:], problem.rows(1, 2).tokens(0, 2).expected(state=problem.rest["state"][1:])[1]) < 1e-6


def test_normalised_linear_attention_is_a_weighted_mean() -> None:
    """With positive features and a fresh state each output is a convex combination of values."""
    problem = make("linear", B=1, H=1, HV=1, T=30)
    q, k = mx.abs(problem.q), mx.abs(problem.k)
    y, (S, Z) = reference.scan("linear", q, k, problem.v, normalize=True)
    weights = mx.tril(q[:, :, 0] @ k[:, :, 0].swapaxes(-1, -2))
    want = (weights / weights.sum(axis=-1, keepdims=True)) @ problem.v[:, :, 0]
    assert error(y[:, :, 0], want) < 1e-6
    assert error(Z[0], k[0].sum(axis=0)) < 1e-6
