"""RWKV-7's time mixing between its projections: its definition in plain operations, and the same by kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np

from mlxlin.backend import mx, on_metal
from mlxlin.metal.mixer import Mixed
from mlxlin.metal.recurrence import supports
from mlxlin.metal.rwkv7 import SLOWEST, TimeMix, finish, longest, prepare, time_mix

from .probe import TOLERANCE, float64, relative_error, trusted_by_key
from .run import run


def advance(x: TimeMix) -> tuple[mx.array, mx.array]:
    """y [B, T, D] and the state S, by kernels where they serve and were found right, else by `mix`."""
    if not takes(x):
        return mix(x)
    mixed = by_kernels(x)
    return mixed.y, mixed.S


def takes(x: TimeMix) -> bool:
    """Whether kernels run such a call here, and do it right."""
    (B, T, _, K), dtype = x.sizes, x.r.dtype
    if not on_metal() or not supports(K, K) or dtype not in TOLERANCE or T == 0 or B == 0:
        return False
    few = T <= longest(K)
    key = f"{'time_mix' if few else 'time_mix_prefill'}-K{K}-{str(dtype).rsplit('.', 1)[-1]}"
    tokens = min(2, longest(K)) if few else longest(K) + 20
    return trusted_by_key(key, lambda: complaint(sample(2, K, tokens, dtype)))


def by_kernels(x: TimeMix) -> Mixed:
    """The kernels, whether or not they were checked on this machine: one for a few tokens, for many four."""
    if x.sizes[1] <= longest(x.sizes[3]):
        return time_mix(x)
    ready = prepare(x)
    vectors: dict[str, Any] = {"g": ready.g, "a": ready.a, "b": ready.b}
    out, S = run("dplr", ready.q, ready.k, ready.v, **vectors, state=x.S, lengths=x.lengths)
    assert isinstance(S, mx.array)
    return Mixed(finish(x, ready.k, out), S)


def mix(x: TimeMix) -> tuple[mx.array, mx.array]:
    """The same in plain operations; padding is anything."""
    B, T, H, K = x.sizes

    def heads(z: mx.array) -> mx.array:
        return z.reshape(B, T, H, K)

    rate = mx.sigmoid(x.rate)
    removal = mx.fast.rms_norm(heads(x.k * x.k_k), _unit(K, x.r.dtype), x.key_eps / K)
    r, k, v = heads(x.r), heads(x.k * (1 + (rate - 1) * x.k_a)), heads(x.v)
    g = SLOWEST * mx.sigmoid(heads(x.decay).astype(mx.float32))
    y, S = run("dplr", r, k, v, g=g, a=-removal, b=removal * heads(rate), state=x.S, lengths=x.lengths)
    assert isinstance(S, mx.array)
    bonus = (r * k * x.r_k).sum(axis=-1, keepdims=True) * v
    y = mx.fast.layer_norm(y, None, None, x.eps).reshape(B, T, -1) * x.gain + x.bias
    return (y + bonus.reshape(y.shape)) * x.gate, S


@cache
def _unit(K: int, dtype: mx.Dtype) -> mx.array:
    """The gain that makes vectors of RMS 1 unit vectors."""
    gain = mx.full((K,), K**-0.5, dtype=dtype)
    mx.eval(gain)
    return gain


def complaint(x: TimeMix) -> str:
    """What is wrong with the kernels' results for x; empty where nothing is."""
    found, (y, S) = by_kernels(x), mix(in_float32(x))
    # for many tokens the inputs of the recurrence are rounded to the dtype of the projections
    inputs = mx.float32 if x.sizes[1] <= longest(x.sizes[3]) else x.r.dtype
    pairs = ((found.y, y, TOLERANCE[found.y.dtype]), (found.S, S, TOLERANCE[inputs]))
    wrong = [e for a, b, limit in pairs if not (e := relative_error(a, float64(b))) < limit]
    return f"results are off by {max(wrong):.1e}" if wrong else ""


def in_float32(x: TimeMix) -> TimeMix:
    """The same numbers in arrays that round nothing."""
    arrays: dict[str, Any] = {f.name: z for f in fields(x) if isinstance(z := getattr(x, f.name), mx.array)}
    arrays.pop("lengths", None)
    return replace(x, **{name: z.astype(mx.float32) for name, z in arrays.items()})


def sample(heads: int, K: int, tokens: int, dtype: mx.Dtype) -> TimeMix:
    """A small call with random numbers."""
    rng, D = np.random.default_rng(0), heads * K

    def normal(*shape: int, kind: mx.Dtype = dtype) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(kind)

    r, k, v, gate, decay, rate = (normal(2, tokens, D) for _ in range(6))
    k_k, k_a, gain, bias = (normal(D) for _ in range(4))
    S, r_k = normal(2, heads, K, K, kind=mx.float32), normal(heads, K)
    return TimeMix(r, k, v, gate, decay, rate, S, k_k, k_a, gain, bias, r_k, eps=1e-5, key_eps=1e-6)
