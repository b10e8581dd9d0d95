"""Random calls of every rule, and the measure by which results are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlxlin.backend import mx
from mlxlin.recurrences import RULES, reference, run
from mlxlin.recurrences.rules import check

# One table for all comparisons: relative RMS against float64 on the same rounded inputs.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
GATES: dict[str, list[float]] = {
    "none": [0.0],
    "slow": [-1e-4],
    "mild": [-0.1, -0.3, -0.01],
    "strong": [-5.0, -20.0, -50.0],
    "reset": [-np.inf],
    "mixed": [-1e-3] * 12 + [-50.0, -np.inf],
    "wild": [0.0, -1e-4, -0.1, -5.0, -50.0, -np.inf],
}
RULE_NAMES = tuple(RULES)


@dataclass(frozen=True)
class Problem:
    """The arguments of one call of `run`."""

    rule: str
    q: mx.array
    k: mx.array
    v: mx.array
    rest: dict[str, Any]

    def run(self, **more: Any) -> tuple[mx.array, Any]:
        return run(self.rule, self.q, self.k, self.v, **{**self.rest, **more})

    def expected(self, **more: Any) -> tuple[np.ndarray, np.ndarray]:
        """y and S in float64."""
        y, S, _ = reference.scan_float64(check(self.rule, self.q, self.k, self.v, **{**self.rest, **more}))
        return y, S

    def tokens(self, start: int, stop: int) -> Problem:
        """Tokens start .. stop, without a state."""
        n = self.k.shape[1] // max(self.q.shape[1], 1)

        def cut(x: mx.array) -> mx.array:
            m = n if x.shape[1] != self.q.shape[1] else 1
            return x[:, start * m : stop * m]

        rest = {name: cut(x) for name, x in self.rest.items() if name in ("g", "beta", "a", "b")}
        rest.update({name: x for name, x in self.rest.items() if name == "normalize"})
        return Problem(self.rule, cut(self.q), cut(self.k), cut(self.v), rest)

    def rows(self, start: int, stop: int) -> Problem:
        """Rows start .. stop of the batch."""
        rest = {name: x if isinstance(x, bool) else x[start:stop] for name, x in self.rest.items()}
        return Problem(self.rule, self.q[start:stop], self.k[start:stop], self.v[start:stop], rest)

    def with_(self, **changes: Any) -> Problem:
        own = {name: changes.pop(name) for name in ("q", "k", "v") if name in changes}
        return replace(self, **own, rest={**self.rest, **changes})


def make(
    rule: str,
    *,
    B: int = 2,
    T: int = 75,
    H: int = 2,
    HV: int | None = None,
    K: int = 32,
    V: int = 24,
    n: int = 2,
    gates: str = "mild",
    decay: str | None = None,
    beta: float | None = None,
    cosine: float = 0.0,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
) -> Problem:
    """A random problem with a non-zero state, unit keys (pairwise cosine about `cosine`) and scaled queries."""
    rng = np.random.default_rng(seed)
    HV = HV or 2 * H
    kind = RULES[rule]
    n = n if kind.substeps else 1

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    def unit(*shape: int) -> np.ndarray:
        own = normal(*shape)
        own /= np.linalg.norm(own, axis=-1, keepdims=True)
        common = normal(shape[0], 1, *shape[2:])
        common /= np.linalg.norm(common, axis=-1, keepdims=True)
        x = np.sqrt(1 - cosine) * own + np.sqrt(cosine) * common
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def array(x: np.ndarray, dtype: mx.Dtype = dtype) -> mx.array:
        return mx.array(x.astype(np.float32)).astype(dtype)

    rest: dict[str, Any] = {"state": array(normal(B, HV, V, K), mx.float32)}
    decay = decay or kind.decays[-1]
    if decay != "none":
        shape = (B, T, HV, *{"head": [], "channel": [K], "value": [V]}[decay])
        rest["g"] = array(rng.choice(GATES[gates], size=shape), mx.float32)
    if kind.write == "delta":
        # w - beta stays between -1 and 1 where the state before the decay is corrected
        most = 1 if kind.reader else 2
        drawn = rng.uniform(0, most, (B, T * n, HV))
        rest["beta"] = array(drawn if beta is None else np.full((B, T * n, HV), min(beta, most)))
    if kind.write == "low_rank":
        removal = unit(B, T, H, K)
        rest["a"], rest["b"] = array(-removal), array(removal * rng.uniform(0, 1, removal.shape))
    q, k = array(normal(B, T, H, K) / np.sqrt(K)), unit(B, T * n, H, K)
    if kind.reader:
        rest["a"] = array(k * rng.uniform(0.5, 1, (B, T, H, 1)))
    return Problem(rule, q, array(k), array(normal(B, T * n, HV, V)), rest)


def error(x: mx.array, expected: Any, scale: float = 1.0) -> float:
    """Relative RMS difference; on the absolute `scale` where all that is expected is 0. NaN counts as infinite."""
    got = np.array(x.astype(mx.float32)).astype(np.float64)
    want = np.array(expected.astype(mx.float32)) if isinstance(expected, mx.array) else np.asarray(expected)
    want = want.astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if got.size == 0:
        return 0.0
    size = float(np.sqrt(np.mean(want**2)))
    off = float(np.sqrt(np.mean((got - want) ** 2))) / (size or scale)
    return off if np.isfinite(off) else np.inf


def assert_matches(problem: Problem, got: tuple[mx.array, mx.array], **more: Any) -> None:
    """y within the tolerance of its dtype and S within that of float32, against the definition."""
    y, S = problem.expected(**more)
    assert got[0].dtype == problem.v.dtype
    assert got[1].dtype == mx.float32
    assert error(got[0], y) < TOLERANCE[problem.v.dtype]
    assert error(got[1], S) < TOLERANCE[mx.float32]
