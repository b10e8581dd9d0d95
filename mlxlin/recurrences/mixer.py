"""A mixer between its projections and its output projection: `advance` is the door beside `run`.

`mix` is the definition in plain operations. On Metal a few tokens are one kernel, and many are four: what precedes the
recurrence, its two chunk kernels, norm and gate.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from typing import Any

from mlxlin.backend import mx, on_metal
from mlxlin.metal import decode as kernel
from mlxlin.metal.layers import gated_norm
from mlxlin.metal.mixer import Activation, FusedSpec, Mixed, Projected, longest, parts
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import supports

from .probe import TOLERANCE, float64, relative_error, trusted_by_key
from .run import run
from .samples import sample_mixer

_RULES = {
    ("add", "none"): "linear",
    ("add", "head"): "decay",
    ("add", "channel"): "gated",
    ("delta", "none"): "delta",
    ("delta", "head"): "gated_delta",
    ("delta", "channel"): "kda",
    ("low_rank", "head"): "dplr",
    ("low_rank", "channel"): "dplr",
}


def rule_of(spec: FusedSpec) -> str:
    """The name `run` knows the mixer's recurrence by."""
    return "delta_product" if spec.substeps > 1 else _RULES[spec.write, spec.decay]


def takes(spec: FusedSpec, batch: int, tokens: int, dtype: mx.Dtype) -> bool:
    """Whether kernels run so many tokens of such a mixer here, and do it right."""
    fits = supports(spec.key_dim, spec.value_dim) and dtype in TOLERANCE and tokens > 0 and batch > 0
    few = tokens <= longest(spec, batch)
    if not on_metal() or not fits or (not few and spec.write == "low_rank"):
        return False
    sampled = min(2, longest(spec, batch)) if few else longest(spec, 1) + 20
    key = _key(spec, "decode" if few else "prefill", parts(spec, batch), dtype)
    return trusted_by_key(key, lambda: complaint(spec, sample_mixer(spec, batch, sampled, dtype)))


@cache  # spelling a specification out for every layer of every token would cost more than the dispatch
def _key(spec: FusedSpec, kernel: str, parts: int, dtype: mx.Dtype) -> str:
    sizes = f"{rule_of(spec)}-K{spec.key_dim}-V{spec.value_dim}-{spec.heads}x{spec.value_heads}"
    rest = hashlib.sha256(repr(spec).encode()).hexdigest()[:8]
    return f"{kernel}-{sizes}-{rest}-parts{parts}-{str(dtype).rsplit('.', 1)[-1]}"


def advance(spec: FusedSpec, x: Projected) -> Mixed:
    """A mixer over T tokens: by kernels where `takes` says so, else by `mix`."""
    stream = x.streams[0]
    return by_kernels(spec, x) if takes(spec, stream.shape[0], stream.shape[1], stream.dtype) else mix(spec, x)


def by_kernels(spec: FusedSpec, x: Projected) -> Mixed:
    """The kernels, whether or not they were checked on this machine."""
    B, T, _ = x.streams[0].shape
    if T > longest(spec, B):
        ready = prefill(spec, x)
        gates: dict[str, Any] = {"g": ready.g, "beta": ready.beta, "state": x.S, "lengths": x.lengths}
        y, S = run(rule_of(spec), ready.q, ready.k, ready.v, **gates)
        assert isinstance(S, mx.array)
        return Mixed(_finished(spec, x, y), S, ready.memory)
    mixed = kernel.decode(spec, x)
    return mixed if parts(spec, B) == 1 else replace(mixed, y=_finished(spec, x, mixed.y))


def _finished(spec: FusedSpec, x: Projected, y: mx.array) -> mx.array:
    """Norm and gate in a dispatch of their own."""
    if not spec.norm or x.norm is None:
        return finish(spec, x, y.astype(mx.float32)).astype(y.dtype)
    B, T, HV, V = y.shape
    z = gated_norm(y.reshape(B, T, HV * V), x.gate, x.norm, spec.eps, activation=spec.gate, groups=HV)
    return z.reshape(y.shape)


def complaint(spec: FusedSpec, x: Projected) -> str:
    """What is wrong with the kernels' results for x; empty where nothing is."""
    found = by_kernels(spec, x)
    exact, (B, T, _) = mix(spec, in_float32(x)), x.streams[0].shape
    # prefill rounds the inputs of the recurrence to the dtype of the projections, decode rounds none
    inputs = TOLERANCE[found.y.dtype if T > longest(spec, B) else mx.float32]
    pairs = ((found.y, exact.y, TOLERANCE[found.y.dtype]), (found.S, exact.S, inputs))
    wrong = [e for a, b, limit in pairs if not (e := relative_error(a, float64(b))) < limit]
    return f"results are off by {max(wrong):.1e}" if wrong else ""


def in_float32(x: Projected) -> Projected:
    """The same numbers in projections that round nothing."""
    q, k, v = (z.astype(mx.float32) for z in x.streams)
    return replace(x, qkv=(q, k, v) if isinstance(x.qkv, tuple) else q)


def mix(spec: FusedSpec, x: Projected) -> Mixed:
    """Convolution, activations, unit norm, gates, recurrence, norm and output gate, computed in float32.

    Returns:
        y [B, T, HV, V] in the dtype of the projections, the state, and the convolution's memory.
    """
    given, memory = arguments(spec, x)
    q, k, v = (given.pop(name) for name in "qkv")
    gates: dict[str, Any] = {**given, "state": x.S, "lengths": x.lengths}
    y, S = run(rule_of(spec), q, k, v, **gates)
    assert isinstance(S, mx.array)
    return Mixed(finish(spec, x, y).astype(x.streams[0].dtype), S, memory)


def arguments(spec: FusedSpec, x: Projected) -> tuple[dict[str, mx.array], mx.array | None]:
    """What `run` takes, by name and in float32, and the convolution's memory."""
    q, k, v, memory = _streams(spec, x)
    B, T = q.shape[:2]
    n, H, HV = spec.substeps, spec.heads, spec.value_heads
    q, k = (z.reshape(B, -1, H, spec.key_dim) for z in (q, k))
    if spec.unit:
        q, k = (z * mx.rsqrt((z * z).sum(axis=-1, keepdims=True) + 1e-6) for z in (q, k))
    given = {"q": q * spec.scale, "k": k, "v": v.reshape(B, T * n, HV, spec.value_dim)}
    g = log_decay(spec, x)
    if g is not None:
        given["g"] = g
    if x.beta is not None:
        beta = _activated(spec.beta, x.beta.astype(mx.float32)) * spec.beta_factor
        given["beta"] = beta.reshape(B, T * n, HV)
    if x.a is not None and x.b is not None:
        given |= {name: z.reshape(B, T, H, -1).astype(mx.float32) for name, z in (("a", x.a), ("b", x.b))}
    return given, memory


def finish(spec: FusedSpec, x: Projected, y: mx.array) -> mx.array:
    """The norm over each head of y [B, T, HV, V] and the output gate."""
    if spec.norm:
        y = mx.fast.rms_norm(y, None if x.norm is None else x.norm.astype(y.dtype), spec.eps)
    if x.gate is not None:
        y = y * _activated(spec.gate, x.gate.astype(mx.float32)).reshape(y.shape)
    return y


def log_decay(spec: FusedSpec, x: Projected) -> mx.array | None:
    """g [B, T, HV] or [B, T, HV, K], see `FusedSpec.decay_kind`."""
    if x.decay is None:
        return None
    g = x.decay.astype(mx.float32)
    g = g if spec.decay == "head" else g.reshape(*g.shape[:2], spec.value_heads, spec.key_dim)
    if spec.decay_kind == "logsigmoid":
        return mx.maximum(-mx.logaddexp(-g, 0.0) / spec.decay_constant, spec.decay_floor)
    if x.rate is None or x.decay_bias is None:
        return g
    rate = x.rate if spec.decay == "head" else x.rate[:, None]
    shifted = g + x.decay_bias.reshape(g.shape[2:])
    if spec.decay_kind == "softplus":
        return rate * mx.logaddexp(shifted, 0.0)
    return spec.decay_constant * mx.sigmoid(rate * shifted)


def _streams(spec: FusedSpec, x: Projected) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """q, k and v [B, T, heads and sub-tokens and channels] in float32 behind the convolution, and its new memory."""
    memory = None
    if isinstance(x.qkv, tuple):
        q, k, v = (z.astype(mx.float32) for z in x.qkv)
    else:
        qkv, memory = (x.qkv, None) if x.weight is None else convolve(x)
        keys = spec.heads * spec.key_dim
        q, k, v = mx.split(qkv.astype(mx.float32), [keys, keys * (1 + spec.substeps)], axis=-1)
    return (
        _activated(spec.qk_activation, q),
        _activated(spec.qk_activation, k),
        _activated(spec.v_activation, v),
        memory,
    )


def convolve(x: Projected) -> tuple[mx.array, mx.array]:
    """The causal depthwise convolution in float32, and its last raw inputs as they came."""
    assert isinstance(x.qkv, mx.array) and x.weight is not None and x.memory is not None
    (taps, _), T = x.weight.shape, x.qkv.shape[1]
    window = mx.concatenate([x.memory, x.qkv], axis=1)
    y = mx.zeros(()) if x.bias is None else x.bias.astype(mx.float32)
    for j in range(taps):
        y = y + window[:, j : j + T].astype(mx.float32) * x.weight[j].astype(mx.float32)
    last = mx.full((x.qkv.shape[0],), T) if x.lengths is None else x.lengths
    kept = last[:, None] + mx.arange(taps - 1)
    return y, mx.take_along_axis(window, kept[:, :, None], axis=1)


def _activated(kind: Activation, x: mx.array) -> mx.array:
    if kind == "none":
        return x
    return x * mx.sigmoid(x) if kind == "silu" else mx.sigmoid(x)
