"""A state that is read before it is written, with a bonus for the token's own write, against its formula."""

from __future__ import annotations

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.recurrences.read_first import run_read_first


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("groups", [1, 2])
def test_each_token_reads_what_the_tokens_before_it_left(T: int, groups: int) -> None:
    rng, (B, H, K, V) = np.random.default_rng(T), (2, 2, 16, 8)
    HV, lengths = H * groups, [T, T - 1]
    q, k = (rng.normal(size=(B, T, H, K)) / 4 for _ in range(2))
    v, u, S = rng.normal(size=(B, T, HV, V)), rng.normal(size=(H, K)), rng.normal(size=(B, HV, V, K))
    g = rng.choice([0.0, -1e-4, -0.1, -5.0, -np.inf], size=(B, T, HV, K))
    arrays = [mx.array(x.astype(np.float32)) for x in (q, k, v, g, u, S)]
    y, after = run_read_first(
        *arrays[:3], g=arrays[3], bonus=arrays[4], state=arrays[5], lengths=mx.array(lengths, dtype=mx.int32)
    )
    expected = np.zeros((B, T, HV, V))
    for b, t, h in np.ndindex(B, T, HV):
        if t >= lengths[b]:
            continue
        reader, key = q[b, t, h // groups], k[b, t, h // groups]
        expected[b, t, h] = S[b, h] @ reader + (reader @ (u[h // groups] * key)) * v[b, t, h]
        S[b, h] = S[b, h] * np.exp(g[b, t, h]) + np.outer(v[b, t, h], key)
    for found, wanted in ((y, expected), (after, S)):
        scale = np.sqrt(np.mean(wanted**2)) or 1.0
        assert np.sqrt(np.mean((np.array(found) - wanted) ** 2)) < 1e-5 * scale
