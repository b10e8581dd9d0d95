"""Small calls that are hard to get right, for checking kernels on the machine they run on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlxlin.backend import mx
from mlxlin.metal.mixer import FusedSpec, Projected

from .rules import RULES, DecayKind, Inputs, check

GATES = (0.0, -1e-4, -0.1, -5.0, -50.0, -float("inf"))


def sample_like(x: Inputs, tokens: int) -> Inputs:
    """A small hard call with the head sizes, dtypes and options of x: two rows, one shorter, gates of every size."""
    groups = x.value_heads // x.heads
    K, V = x.q.shape[3], x.v.shape[3]
    return sample(x.rule.name, x.decay, K, V, groups, tokens, x.v.dtype, substeps=x.substeps, normalize=x.Z is not None)


def sample(
    rule: str,
    decay: DecayKind,
    K: int,
    V: int,
    groups: int,
    tokens: int,
    dtype: mx.Dtype,
    *,
    substeps: int = 1,
    normalize: bool = False,
) -> Inputs:
    """One key head, two rows of `tokens` and `tokens - 2` tokens, correlated keys, mixed gates."""
    rng, B, n = np.random.default_rng(0), 2, tokens * substeps

    def array(x: npt.NDArray[np.float64], kind: mx.Dtype = dtype) -> mx.array:
        return mx.array(x.astype(np.float32)).astype(kind)

    def keys(count: int) -> npt.NDArray[np.float64]:
        k = rng.normal(size=(B, 1, 1, K)) + 0.5 * rng.normal(size=(B, count, 1, K))
        return np.abs(k) if normalize else k / np.linalg.norm(k, axis=-1, keepdims=True)

    given: dict[str, Any] = {
        "q": array(np.abs(rng.normal(size=(B, tokens, 1, K))) * K**-0.5),
        "k": array(keys(n)),
        "v": array(rng.normal(size=(B, n, groups, V))),
    }
    if decay != "none":
        shape = (B, tokens, groups, *{"head": [], "channel": [K], "value": [V]}[decay])
        given["g"] = array(rng.choice(GATES, size=shape), mx.float32)
    if RULES[rule].write == "delta":
        given["beta"] = array(rng.uniform(0, 1 if RULES[rule].reader else 2, (B, n, groups)))
    if RULES[rule].reader:
        given["a"] = array(keys(tokens))
    if RULES[rule].write == "low_rank":
        a = keys(tokens)
        given |= {"a": array(-a), "b": array(a * rng.uniform(0, 1, a.shape))}
    S = array(rng.normal(size=(B, groups, V, K)), mx.float32)
    Z = array(rng.uniform(size=(B, groups, K)), mx.float32)
    lengths = mx.array([tokens, max(tokens - 2, 0)])
    return check(rule, **given, state=(S, Z) if normalize else S, lengths=lengths, normalize=normalize)


def sample_mixer(spec: FusedSpec, batch: int, tokens: int, dtype: mx.Dtype) -> Projected:
    """Random projections, parameters and state of a mixer; the last row has one token less where it can."""
    rng = np.random.default_rng(0)
    HV, K, V = spec.value_heads, spec.key_dim, spec.value_dim

    def normal(*shape: int, kind: mx.Dtype = dtype) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(kind)

    given: dict[str, Any] = {"S": normal(batch, HV, V, spec.state_dim, kind=mx.float32)}
    if spec.slots:
        given["S_keys"] = normal(batch, HV, spec.slots, K, kind=mx.float32) * K**-0.5
    projected, keys = HV // spec.repeats, 0 if spec.decay_kind == "forget" else spec.keys
    q, k, v = (normal(batch, tokens, n) for n in (spec.heads * spec.head_dim, keys, spec.substeps * projected * V))
    if spec.normalize is not None or "simplex" in (spec.q_norm, spec.k_norm):  # sums of what is not negative
        q, k = mx.abs(q), mx.abs(k)
    given["qkv"] = (q, k, v) if spec.apart else mx.concatenate([q, k, v], axis=-1)
    if spec.normalize is not None:
        given["Z"] = mx.abs(normal(batch, HV, K, kind=mx.float32))
    for name, kind in (("q_gain", spec.q_norm), ("k_gain", spec.k_norm)):
        if kind == "rms":
            given[name] = normal(K)
    if spec.rotary:
        angles = normal(batch, tokens, spec.rotary // 2, kind=mx.float32)
        given |= {"cos": mx.cos(angles), "sin": mx.sin(angles)}
    if spec.reader:
        fractions, corrections = mx.sigmoid(normal(spec.heads, kind=mx.float32)), normal(spec.heads, kind=mx.float32)
        given["reader"] = mx.stack([fractions, corrections])
    if spec.bonus:
        given["bonus"] = normal(spec.heads, K)
    if spec.skip:
        given["skip"] = normal(HV, 1, kind=mx.float32)
    if spec.write == "low_rank":
        unit = rng.normal(size=(batch, tokens, spec.heads, K))
        unit = (unit / np.linalg.norm(unit, axis=-1, keepdims=True)).reshape(batch, tokens, -1)
        a, b = (mx.array(z.astype(np.float32)).astype(dtype) for z in (-unit, unit * rng.uniform(0, 1, unit.shape)))
        given |= {"a": a, "b": b}
    if spec.taps:
        given |= {"weight": normal(spec.taps, spec.width), "memory": normal(batch, spec.taps - 1, spec.width)}
    if spec.decay != "none":
        width = spec.decay_heads * (spec.state_dim if spec.decay == "channel" else 1)
        x = normal(batch, tokens, width)
        given["decay"] = -mx.exp(x.astype(mx.float32)) if spec.decay_kind == "given" else x
        if spec.decay_kind in ("softplus", "sigmoid"):
            rate = mx.exp(normal(spec.decay_heads, kind=mx.float32))
            given |= {
                "rate": -rate if spec.decay_kind == "softplus" else rate,
                "decay_bias": normal(width, kind=mx.float32),
            }
        if spec.decay_kind == "forget":
            given["decay_bias"] = mx.sigmoid(normal(projected, K, kind=mx.float32))
    if spec.write == "delta":
        given["beta"] = normal(batch, tokens, spec.substeps * HV)
    if spec.norm:
        names = ("norm", "norm_bias") if spec.centered else ("norm",)
        given |= {name: normal(HV * V if spec.joint_groups else V) for name in names}
    if spec.gate != "none" and not spec.self_gated:
        given["gate"] = normal(batch, tokens, HV * V)
    if tokens > 1:
        given["lengths"] = mx.array([tokens] * (batch - 1) + [tokens - 1])
    return Projected(**given)
