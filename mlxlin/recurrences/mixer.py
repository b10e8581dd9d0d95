"""A mixer between its projections and its output projection: `advance` is the door beside `run`.

`mix` is the definition in plain operations. On Metal a few tokens are one kernel, and many are four: what precedes the
recurrence, its two chunk kernels, norm and gate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from mlxlin.backend import mx, on_metal
from mlxlin.metal import decode as kernel
from mlxlin.metal.layers import gated_norm
from mlxlin.metal.mixer import FusedSpec, Mixed, Projected, finishes, longest, parts
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import supports

from .features import activated, mapped, normed
from .probe import TOLERANCE, float64, relative_error, trusted_by_key
from .read_first import run_read_first
from .run import run
from .samples import sample_mixer
from .slots import run_slots

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
    if spec.reader:
        return "comba"
    return "delta_product" if spec.substeps > 1 else _RULES[spec.write, spec.decay]


def knows(spec: FusedSpec) -> bool:
    """Whether there are kernels for the sizes of a mixer."""
    return supports(spec.key_dim, spec.slots or spec.value_dim) and supports(spec.state_dim, spec.value_dim)


def takes(spec: FusedSpec, batch: int, tokens: int, dtype: mx.Dtype) -> bool:
    """Whether kernels run so many tokens of such a mixer here, and do it right."""
    fits = knows(spec) and dtype in TOLERANCE and tokens > 0 and batch > 0
    few = tokens <= longest(spec, batch)
    if not on_metal() or not fits:
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
    (B, T, _), dtype = x.first.shape, x.first.dtype
    return by_kernels(spec, x) if takes(spec, B, T, dtype) else mix(spec, x)


def by_kernels(spec: FusedSpec, x: Projected) -> Mixed:
    """The kernels, whether or not they were checked on this machine."""
    B, T, _ = x.first.shape
    if T > longest(spec, B):
        ready = prefill(spec, x)
        if x.S_keys is not None:
            mixed = _by_slots(x, ready.q, ready.k, ready.v, ready.g, ready.lost)
            return replace(mixed, y=_finished(spec, x, mixed.y), memory=ready.memory)
        gates = {name: getattr(ready, name) for name in ("g", "beta", "a", "b")}
        slots = x.lengths + 1 if spec.bonus and x.lengths is not None else x.lengths
        rule = "dplr" if spec.reader else rule_of(spec)
        y, S, Z = _recurrence(rule, x, ready.q, ready.k, ready.v, {**gates, "lengths": slots})
        y = y[:, :-1] if spec.bonus else y
        return Mixed(_finished(spec, x, y, ready.bypass), S, Z, ready.memory)
    mixed = kernel.decode(spec, x)
    return mixed if finishes(spec, B) else replace(mixed, y=_finished(spec, x, mixed.y))


def _recurrence(
    rule: str, x: Projected, q: mx.array, k: mx.array, v: mx.array, gates: Mapping[str, Any]
) -> tuple[mx.array, mx.array, mx.array | None]:
    """y, S and Z."""
    state = x.S if x.Z is None else (x.S, x.Z)
    y, after = run(rule, q, k, v, **gates, state=state, normalize=x.Z is not None)
    return (y, *after) if isinstance(after, tuple) else (y, after, None)


def _by_slots(
    x: Projected, q: mx.array, k: mx.array, v: mx.array, g: mx.array | None, lost: mx.array | None = None
) -> Mixed:
    """Gated slot attention between its gates and its norm."""
    assert x.S_keys is not None and g is not None
    y, S_keys, S = run_slots(q, k, v, g=g, lost=lost, keys=x.S_keys, values=x.S, lengths=x.lengths)
    return Mixed(y, S, S_keys=S_keys)


def _finished(spec: FusedSpec, x: Projected, y: mx.array, bypass: tuple[mx.array, mx.array] | None = None) -> mx.array:
    """What bypasses the recurrence, norm and gate in a dispatch of their own."""
    if not spec.norm and spec.gate == "none" and bypass is None:
        return y
    B, T, HV, V = y.shape
    z = gated_norm(
        y.reshape(B, T, HV * V),
        y.flatten(2) if spec.self_gated else x.gate,
        x.norm,
        spec.eps if spec.norm else None,
        bias=x.norm_bias,
        centered=spec.centered,
        activation=spec.gate,
        groups=spec.joint_groups or HV,
        gate_first=spec.gate_first,
        skip=None if bypass is None else bypass[0],
        v=None if bypass is None else bypass[1],
        lengths=x.lengths,
    )
    return z.reshape(y.shape)


def _without_padding(x: Projected, y: mx.array) -> mx.array:
    """y [B, T, HV, V], zero past the last real token."""
    if x.lengths is None:
        return y
    return mx.where((mx.arange(y.shape[1]) < x.lengths[:, None])[:, :, None, None], y, mx.zeros((), y.dtype))


def complaint(spec: FusedSpec, x: Projected) -> str:
    """What is wrong with the kernels' results for x; empty where nothing is."""
    found = by_kernels(spec, x)
    exact, (B, T, _) = mix(spec, in_float32(x)), x.first.shape
    # prefill rounds the inputs of the recurrence to the dtype of the projections, decode rounds none
    inputs = TOLERANCE[found.y.dtype if T > longest(spec, B) else mx.float32]
    pairs = [(found.y, exact.y, TOLERANCE[found.y.dtype]), (found.S, exact.S, inputs)]
    for other, wanted in ((found.Z, exact.Z), (found.S_keys, exact.S_keys)):
        if other is not None and wanted is not None:
            pairs.append((other, wanted, inputs))
    wrong = [e for a, b, limit in pairs if not (e := relative_error(a, float64(b))) < limit]
    return f"results are off by {max(wrong):.1e}" if wrong else ""


def in_float32(x: Projected) -> Projected:
    """The same numbers in projections that round nothing."""
    wide = tuple(z.astype(mx.float32) for z in (x.qkv if isinstance(x.qkv, tuple) else (x.qkv,)))
    return replace(x, qkv=wide if isinstance(x.qkv, tuple) else wide[0])


def mix(spec: FusedSpec, x: Projected) -> Mixed:
    """Convolution, features, norms, gates, recurrence, norm and output gate, computed in float32.

    Returns:
        y [B, T, HV, V] in the dtype of the projections, the states, and the convolution's memory.
    """
    given, memory = arguments(spec, x)
    q, k, v = (given.pop(name) for name in "qkv")
    if x.S_keys is not None:
        mixed = _by_slots(x, q, k, v, given["g"])
        return replace(mixed, y=finish(spec, x, mixed.y).astype(x.first.dtype), memory=memory)
    if x.bonus is not None:
        y, S = run_read_first(q, k, v, **given, bonus=x.bonus, state=x.S, lengths=x.lengths)
        return Mixed(finish(spec, x, y).astype(x.first.dtype), S, memory=memory)
    written = v if not spec.scales_values else v * _repeated(spec, time_step(spec, x))[..., None]
    y, S, Z = _recurrence(rule_of(spec), x, q, k, written, {**given, "lengths": x.lengths})
    if x.skip is not None:
        y = _without_padding(x, y + x.skip * v)
    return Mixed(finish(spec, x, y).astype(x.first.dtype), S, Z, memory)


def arguments(spec: FusedSpec, x: Projected) -> tuple[dict[str, mx.array], mx.array | None]:
    """What `run` takes, by name and in float32, and the convolution's memory; v as it is before a time step."""
    x, memory = _behind_convolution(spec, x)
    q, k, v = _streams(spec, x)
    B, T = q.shape[:2]
    n = spec.substeps
    g = log_decay(spec, x)
    q = mapped(spec.features, q.reshape(B, T, -1, spec.head_dim))
    if spec.decay_kind == "forget":
        assert g is not None
        k = -mx.expm1(g)
    else:
        k = mapped(spec.features, k.reshape(B, T * n, -1, spec.head_dim))
    if not spec.reader:
        q, k = normed(spec.q_norm, q, x.q_gain, spec.qk_eps), normed(spec.k_norm, k, x.k_gain, spec.qk_eps)
    if x.cos is not None and x.sin is not None:
        q, k = (turned(z, x.cos, x.sin, spec.interleaved) for z in (q, k))
    reader = {}
    if x.reader is not None:
        p = k * x.reader[0, :, None]
        q, k, reader["a"] = (normed("l2", z) for z in (q - p * x.reader[1, :, None], k, p))
    v = v.reshape(B, T * n, -1, spec.value_dim)
    q = q if spec.scale == 1.0 else q * spec.scale
    given = reader | {"q": q, "k": _repeated(spec, k), "v": _repeated(spec, v)}
    if g is not None:
        given["g"] = g if spec.decay_heads == spec.value_heads else _repeated(spec, g)
    if x.beta is not None:
        beta = activated(spec.beta, x.beta.astype(mx.float32)) * spec.beta_factor
        given["beta"] = beta.reshape(B, T * n, spec.value_heads)
    if x.a is not None and x.b is not None:
        given |= {name: z.reshape(B, T, spec.heads, -1).astype(mx.float32) for name, z in (("a", x.a), ("b", x.b))}
    return given, memory


def _repeated(spec: FusedSpec, z: mx.array) -> mx.array:
    """z [B, T, heads, ..] with every head as often as value heads share it."""
    return z if spec.repeats == 1 else mx.repeat(z, spec.repeats, axis=2)


def turned(x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool) -> mx.array:
    """x [B, T, H, K], its leading channels turned by the angles [B, T, dims / 2] of their tokens."""
    half = cos.shape[-1]
    c, s = cos[:, :, None], sin[:, :, None]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    one, two = (turning[..., ::2], turning[..., 1::2]) if interleaved else mx.split(turning, 2, axis=-1)
    pairs = [one * c - two * s, two * c + one * s]
    together = mx.stack(pairs, axis=-1).flatten(-2) if interleaved else mx.concatenate(pairs, axis=-1)
    return mx.concatenate([together, rest], axis=-1)


def finish(spec: FusedSpec, x: Projected, y: mx.array) -> mx.array:
    """The norm over each head of y [B, T, HV, V], or over groups of all channels, and the output gate."""
    given = y if spec.self_gated else x.gate
    gate = None if given is None else activated(spec.gate, given.astype(mx.float32)).reshape(y.shape)
    if gate is not None and spec.gate_first:
        y = y * gate
    if spec.norm:
        groups = spec.joint_groups or spec.value_heads
        z = y.reshape(*y.shape[:2], groups, -1)
        z = mx.fast.layer_norm(z, None, None, spec.eps) if spec.centered else mx.fast.rms_norm(z, None, spec.eps)
        gain, bias = (
            None if w is None else w.astype(y.dtype).reshape(-1, spec.value_dim) for w in (x.norm, x.norm_bias)
        )
        y = z.reshape(y.shape)
        y = y if gain is None else y * gain
        y = y if bias is None else _without_padding(x, y + bias)
    return y if gate is None or spec.gate_first else y * gate


def log_decay(spec: FusedSpec, x: Projected) -> mx.array | None:
    """g [B, T, HV] or [B, T, HV, K], see `FusedSpec.decay_kind`."""
    if x.decay is None:
        return None
    g = x.decay.astype(mx.float32)
    g = g if spec.decay == "head" else g.reshape(*g.shape[:2], -1, spec.state_dim)
    if spec.decay_kind == "logsigmoid":
        g = mx.logaddexp(-g, 0.0) / -spec.decay_constant
        return g if spec.decay_floor == -float("inf") else mx.maximum(g, spec.decay_floor)
    if spec.decay_kind == "exponential":
        return -mx.exp(g)
    if spec.decay_kind == "forget":
        assert x.decay_bias is not None
        return mx.logaddexp(mx.log(x.decay_bias), mx.log1p(-x.decay_bias) - mx.logaddexp(-g, 0.0))
    if x.rate is None or x.decay_bias is None:
        return g
    rate = x.rate if spec.decay == "head" else x.rate[:, None]
    shifted = g + x.decay_bias.reshape(g.shape[2:])
    if spec.decay_kind == "softplus":
        return rate * time_step(spec, x).reshape(g.shape)
    return spec.decay_constant * mx.sigmoid(rate * shifted)


def time_step(spec: FusedSpec, x: Projected) -> mx.array:
    """dt of a softplus decay, in the shape of its projection."""
    assert x.decay is not None and x.decay_bias is not None
    dt = mx.logaddexp(x.decay.astype(mx.float32) + x.decay_bias.flatten(), 0.0)
    return mx.clip(dt, spec.shortest, spec.longest)


def _streams(spec: FusedSpec, x: Projected) -> tuple[mx.array, mx.array, mx.array]:
    """q, k and v [B, T, heads and sub-tokens and channels] in float32; k is empty where the decay makes it."""
    if isinstance(x.qkv, tuple):
        q, k, v = (z.astype(mx.float32) for z in x.qkv)
    else:
        queries, keys = spec.heads * spec.head_dim, 0 if spec.decay_kind == "forget" else spec.keys
        q, k, v = mx.split(x.qkv.astype(mx.float32), [queries, queries + keys], axis=-1)
    return activated(spec.q_activation, q), activated(spec.k_activation, k), activated(spec.v_activation, v)


def _behind_convolution(spec: FusedSpec, x: Projected) -> tuple[Projected, mx.array | None]:
    """The projections behind the convolution, and what that remembers."""
    if x.weight is None:
        return x, None
    assert isinstance(x.qkv, mx.array)
    if not spec.convolves_decay:
        y, memory = convolve(x, x.qkv)
        return replace(x, qkv=y), memory
    assert x.decay is not None
    y, memory = convolve(x, mx.concatenate([x.qkv, x.decay], axis=-1))
    qkv, decay = mx.split(y, [x.qkv.shape[-1]], axis=-1)
    return replace(x, qkv=qkv, decay=decay), memory


def convolve(x: Projected, inputs: mx.array) -> tuple[mx.array, mx.array]:
    """The causal depthwise convolution in float32, and its last raw inputs as they came."""
    assert x.weight is not None and x.memory is not None
    (taps, _), T = x.weight.shape, inputs.shape[1]
    window = mx.concatenate([x.memory, inputs], axis=1)
    y = mx.zeros(()) if x.bias is None else x.bias.astype(mx.float32)
    for j in range(taps):
        y = y + window[:, j : j + T].astype(mx.float32) * x.weight[j].astype(mx.float32)
    last = mx.full((inputs.shape[0],), T) if x.lengths is None else x.lengths
    kept = last[:, None] + mx.arange(taps - 1)
    return y, mx.take_along_axis(window, kept[:, :, None], axis=1)
