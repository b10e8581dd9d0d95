"""A whole mixer in one dispatch against its twin in plain operations, and the tape that takes tokens back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import decode, replay
from mlxlin.metal.mixer import FusedSpec, Mixed, Projected, longest, parts
from mlxlin.recurrences.mixer import finish, in_float32, mix
from tests.msl import last_report

from .cases import TOLERANCE, error, float64

DELTA_NET: dict[str, Any] = {
    "write": "delta",
    "taps": 4,
    "qk_activation": "silu",
    "v_activation": "silu",
    "unit": True,
    "beta": "sigmoid",
    "norm": True,
    "eps": 1e-6,
    "gate": "silu",
}


def gated_delta_net(H: int = 16, groups: int = 1, K: int = 32, V: int = 32, **changes: Any) -> FusedSpec:
    settings = {**DELTA_NET, "decay": "head", "decay_kind": "softplus", "scale": K**-0.5, **changes}
    return FusedSpec(H, H * groups, K, V, **settings)


SPECS = {
    "gated_delta_net": gated_delta_net(8, 2, K=64, V=64),
    "gated_delta_net-split": gated_delta_net(1, 3, K=96, V=128, beta_factor=2.0),
    "delta_net": gated_delta_net(decay="none", decay_kind="given", gate="none", taps=3),
    "delta_product": gated_delta_net(8, 2, substeps=2),
    "kda": gated_delta_net(16, decay="channel", gate="sigmoid"),
    "kda-bounded": gated_delta_net(4, 4, decay="channel", decay_kind="sigmoid", decay_constant=-5.0, V=64),
    "gla": FusedSpec(
        4, 4, 256, 512, "add", "channel", decay_kind="logsigmoid", decay_constant=16.0, norm=True, eps=1e-5, gate="silu"
    ),
    "retention": FusedSpec(8, 8, 32, 64, "add", "head", norm=True, eps=1e-6),
    "linear": FusedSpec(16, 16, 192, 32, "add", "none", qk_activation="silu"),
    "low_rank-head": FusedSpec(16, 16, 32, 32, "low_rank", "head"),
    "low_rank": FusedSpec(16, 16, 64, 64, "low_rank", "channel"),
}


@dataclass(frozen=True)
class Call:
    """One decode call; see SPECS."""

    name: str
    T: int = 1
    B: int = 1
    dtype: mx.Dtype = mx.float32
    lengths: tuple[int, ...] | None = None
    strided: bool = False

    def __str__(self) -> str:
        return f"{self.name}-T{self.T}-B{self.B}-{str(self.dtype).removeprefix('mlx.core.')}"

    def projected(self) -> tuple[FusedSpec, Projected]:
        spec, rng, B, T = SPECS[self.name], np.random.default_rng(7), self.B, self.T
        H, HV, K, V, n = spec.heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.substeps

        def normal(*shape: int, dtype: mx.Dtype = self.dtype) -> mx.array:
            x = mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)
            return mx.stack([x, x], axis=-1)[..., 1] if self.strided else x

        given: dict[str, Any] = {"S": normal(B, HV, V, K, dtype=mx.float32)}
        given["qkv"] = normal(B, T, spec.width)
        if spec.write == "low_rank":
            unit = rng.normal(size=(B, T, H, K))
            unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
            rates = rng.uniform(0, 1, unit.shape)
            a, b = (
                mx.array(z.reshape(B, T, H * K).astype(np.float32)).astype(self.dtype) for z in (-unit, unit * rates)
            )
            given |= {"qkv": tuple(normal(B, T, H * K) for _ in range(3)), "a": a, "b": b}
        if spec.taps:
            given |= {"weight": normal(spec.taps, spec.width) * 0.5, "memory": normal(B, spec.taps - 1, spec.width)}
            given["bias"] = normal(spec.width) if spec.taps == 3 else None
        if spec.decay != "none":
            width = HV * (K if spec.decay == "channel" else 1)
            given["decay"] = normal(B, T, width)
            if spec.decay_kind == "given":
                given["decay"] = -mx.exp(given["decay"].astype(mx.float32))
            if spec.decay_kind in ("softplus", "sigmoid"):
                sign = -1.0 if spec.decay_kind == "softplus" else 1.0
                given |= {
                    "rate": sign * mx.exp(normal(HV, dtype=mx.float32)),
                    "decay_bias": normal(width, dtype=mx.float32),
                }
        if spec.write == "delta":
            given["beta"] = normal(B, T, n * HV)
        if spec.norm:
            given["norm"] = normal(V)
        if spec.gate != "none":
            given["gate"] = normal(B, T, HV * V)
        if self.lengths is not None:
            given["lengths"] = mx.array(self.lengths, dtype=mx.int32)
        return spec, Projected(**given)


CALLS = [
    Call("gated_delta_net", dtype=mx.bfloat16, strided=True),
    Call("gated_delta_net-split", T=3, B=2, lengths=(3, 1)),
    Call("delta_net", T=2, B=2, lengths=(0, 2), strided=True),
    Call("delta_product", T=5),
    Call("kda", T=1, dtype=mx.float16),
    Call("kda-bounded", T=7, B=2, lengths=(7, 4)),
    Call("gla", T=1, dtype=mx.bfloat16),
    Call("retention", T=2, B=3),
    Call("linear", T=1),
    Call("low_rank", T=6, strided=True),
    Call("low_rank-head", T=2),
]


def assert_equal_mixed(spec: FusedSpec, x: Projected, found: Mixed) -> None:
    """At the tolerance of the dtype, against the twin in float32."""
    y, expected = found.y, mix(spec, in_float32(x))
    if parts(spec, y.shape[0]) > 1:
        y = finish(spec, x, y.astype(mx.float32)).astype(y.dtype)
    assert error(y, float64(expected.y)) < TOLERANCE[y.dtype]
    assert error(found.S, float64(expected.S)) < TOLERANCE[mx.float32]
    if expected.memory is not None:
        assert found.memory is not None
        assert mx.array_equal(found.memory.astype(mx.float32), expected.memory.astype(mx.float32))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_decode_equals_operations(call: Call) -> None:
    spec, x = call.projected()
    assert_equal_mixed(spec, x, decode(spec, x))


@pytest.mark.parametrize("name", ["gated_delta_net-split", "delta_product", "kda-bounded", "low_rank"])
def test_b53_replaying_a_tape_gives_the_bits_of_the_accepted_tokens(name: str) -> None:
    T = 5
    spec, x = Call(name, T=T, B=2).projected()
    verified = decode(spec, x, tape=True)
    assert verified.tape is not None
    for accepted in range(T + 1):
        count = mx.full((2,), accepted)
        plain = decode(spec, replace(x, lengths=count)).S
        assert mx.array_equal(replay(spec, x.S, verified.tape, count), plain)
    assert mx.array_equal(replay(spec, x.S, verified.tape, mx.array([T, T])), verified.S)
    ragged = replay(spec, x.S, verified.tape, mx.array([1, 4]))
    assert mx.array_equal(ragged[1], replay(spec, x.S, verified.tape, mx.array([4, 4]))[1])


def test_one_token_at_a_time_equals_all_at_once() -> None:
    spec, x = Call("gated_delta_net", T=4).projected()
    whole, outputs, S, memory = decode(spec, x), [], x.S, x.memory
    assert isinstance(x.qkv, mx.array)
    for t in range(4):
        token = {name: getattr(x, name)[:, t : t + 1] for name in ("qkv", "decay", "beta", "gate")}
        one = decode(spec, replace(x, **token, S=S, memory=memory))
        outputs.append(one.y)
        S, memory = one.S, one.memory
    assert mx.array_equal(mx.concatenate(outputs, axis=1), whole.y)
    assert mx.array_equal(S, whole.S)
    assert memory is not None and whole.memory is not None and mx.array_equal(memory, whole.memory)


def test_padding_is_never_read() -> None:
    spec, x = Call("kda-bounded", T=3).projected()
    assert isinstance(x.qkv, mx.array)
    real = decode(spec, replace(x, **{n: getattr(x, n)[:, :2] for n in ("qkv", "decay", "beta", "gate")}))
    spoilt = {
        n: mx.concatenate([getattr(x, n)[:, :2], mx.full_like(getattr(x, n)[:, :1], mx.nan)], axis=1)
        for n in ("qkv", "decay", "beta", "gate")
    }
    padded = decode(spec, replace(x, **spoilt, lengths=mx.array([2])))
    assert mx.array_equal(padded.S, real.S) and mx.array_equal(padded.y[:, :2], real.y)
    assert mx.all(padded.y[:, 2] == 0)


@pytest.mark.parametrize("name", SPECS)
def test_the_longest_call_fits_into_threadgroup_memory(name: str) -> None:
    spec = SPECS[name]
    T = longest(spec, 1)
    assert 1 <= T <= 16
    if name in ("gla", "kda"):  # the widest record, and the most tokens
        assert_equal_mixed(*(call := Call(name, T=T).projected()), decode(*call))
        assert last_report().threadgroup_bytes <= 32768
