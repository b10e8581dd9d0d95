"""Inputs that are hard for a recurrence, and the comparison with the float64 definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxlin.backend import mx
from mlxlin.recurrences.kernels import arguments as arguments
from mlxlin.recurrences.reference import scan_float64
from mlxlin.recurrences.rules import RULES, Inputs, check

Float64 = npt.NDArray[np.float64]
TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
GATES = np.array([0.0, -1e-4, -0.1, -5.0, -50.0, -np.inf])


@dataclass(frozen=True)
class Case:
    """One call of a recurrence.

    Attributes:
        keys: "random"; "correlated", pairwise cosines of 0.9 to 0.999 with every fifth key zero; "alike", of 0.999.
        gates: "mild"; "slow", all -1e-4; "mixed", drawn from {0, -1e-4, -0.1, -5, -50, -inf}.
        beta: None for values in (0, 2), or one value for all.
        strided: the inputs are slices and transposed views of larger arrays.
        lengths: real tokens of each row; padding is NaN.
    """

    rule: str
    T: int = 33
    B: int = 1
    H: int = 1
    groups: int = 2
    K: int = 32
    V: int = 32
    dtype: mx.Dtype = mx.float32
    decay: str = ""
    keys: str = "random"
    gates: str = "mild"
    beta: float | None = None
    substeps: int = 1
    normalize: bool = False
    strided: bool = False
    lengths: tuple[int, ...] | None = None
    seed: int = 0

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if k != "rule" and v != getattr(Case("linear"), k)]
        return "-".join([self.rule, *(part.replace("mlx.core.", "") for part in changed)])

    def inputs(self) -> Inputs:
        rule, rng = RULES[self.rule], np.random.default_rng(self.seed)
        B, T, H, K, HV, V, n = self.B, self.T, self.H, self.K, self.H * self.groups, self.V, self.substeps
        keys = _keys(rng, (B, T * n, H, K), self.keys)
        if self.normalize:
            keys = np.abs(keys)
        given: dict[str, Float64] = {
            "q": rng.normal(size=(B, T, H, K)) * K**-0.5,
            "k": keys,
            "v": rng.normal(size=(B, T * n, HV, V)),
        }
        if self.normalize:
            given["q"] = np.abs(given["q"])
        if rule.write == "delta":
            given["beta"] = (
                rng.uniform(0, 2, (B, T * n, HV)) if self.beta is None else np.full((B, T * n, HV), self.beta)
            )
        if rule.reader:
            given |= {"beta": given["beta"] / 2, "a": _keys(rng, (B, T, H, K), self.keys)}
        if rule.write == "low_rank":
            kk = _keys(rng, (B, T, H, K), self.keys)
            given |= {"a": -kk, "b": kk * rng.uniform(0, 1, kk.shape)}
        arrays = {name: mx.array(x.astype(np.float32)).astype(self.dtype) for name, x in given.items()}
        decay = self.decay or rule.decays[-1]
        if decay != "none":
            channels = {"head": (), "channel": (K,), "value": (V,)}[decay]
            arrays["g"] = mx.array(_gates(rng, (B, T, HV, *channels), self.gates))
        if self.lengths is not None:
            arrays = {name: _spoil_padding(x, self.lengths, T) for name, x in arrays.items()}
        if self.strided:
            arrays = {name: _strided(x) for name, x in arrays.items()}
        state: Any = mx.array(rng.normal(size=(B, HV, V, K)).astype(np.float32))
        if self.normalize:
            state = (state, mx.array(rng.uniform(size=(B, HV, K)).astype(np.float32)))
        lengths = None if self.lengths is None else mx.array(self.lengths, dtype=mx.int32)
        return check(self.rule, **arrays, state=state, lengths=lengths, normalize=self.normalize)


def float64(x: mx.array) -> Float64:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def error(found: mx.array, expected: Float64, scale: float = 1.0) -> float:
    """RMS of the difference relative to the RMS of what is expected; to `scale` where that is zero."""
    if expected.size == 0:
        return 0.0
    difference = np.sqrt(np.mean((float64(found) - expected) ** 2))
    return float(difference / (np.sqrt(np.mean(expected**2)) or scale))


def assert_equals_reference(x: Inputs, y: mx.array, S: mx.array, Z: mx.array | None = None) -> None:
    """y at the tolerance of its dtype, the float32 states at that of float32."""
    y_expected, S_expected, Z_expected = scan_float64(without_padding(x))
    assert y.shape == y_expected.shape and y.dtype == x.v.dtype and S.dtype == mx.float32
    assert error(y, y_expected) < TOLERANCE[y.dtype]
    assert error(S, S_expected) < TOLERANCE[mx.float32]
    if Z_expected is not None:
        assert Z is not None
        assert error(Z, Z_expected) < TOLERANCE[mx.float32]


def without_padding(x: Inputs) -> Inputs:
    """The same call with numbers in place of the NaN behind each row's length (the definition ignores them)."""
    if x.lengths is None:
        return x
    clean = {
        name: mx.nan_to_num(z) if (z := getattr(x, name)) is not None else None
        for name in ("q", "k", "v", "beta", "a", "b")
    }
    g = None if x.g is None else mx.where(mx.isnan(x.g), mx.zeros(()), x.g)
    return replace(x, g=g, **clean)


def _keys(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Float64:
    keys = rng.normal(size=shape)
    if kind != "random":
        spread = rng.choice([0.03, 0.1, 0.3] if kind == "correlated" else [0.03], size=(*shape[:-1], 1))
        keys = rng.normal(size=(shape[0], 1, shape[2], shape[3])) + spread * keys
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    if kind == "correlated":
        keys[:, 4::5] = 0
    return keys


def _gates(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> npt.NDArray[np.float32]:
    if kind == "slow":
        return np.full(shape, -1e-4, np.float32)
    g = rng.choice(GATES, size=shape) if kind == "mixed" else -np.exp(rng.normal(size=shape) - 2)
    return g.astype(np.float32)


def _spoil_padding(x: mx.array, lengths: tuple[int, ...], T: int) -> mx.array:
    """NaN wherever nothing may be read."""
    real = mx.arange(x.shape[1]) // (x.shape[1] // T) < mx.array(lengths)[:, None]
    return mx.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, mx.array(mx.nan, x.dtype))


def _strided(x: mx.array) -> mx.array:
    """The same numbers with heads before tokens in memory and every other element of the last axis in use."""
    spread = mx.stack([x, x], axis=-1).swapaxes(1, 2)
    return mx.contiguous(spread).swapaxes(1, 2)[..., 1]
