"""A whole mixer in one dispatch against its twin in plain operations, and the tape that takes tokens back."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import decode, replay, replay_keys
from mlxlin.metal.mixer import FusedSpec, Mixed, Projected, finishes, longest
from mlxlin.recurrences.mixer import finish, in_float32, mix
from mlxlin.recurrences.samples import sample_mixer
from tests.msl import last_report

from .cases import TOLERANCE, error, float64

DELTA_NET: dict[str, Any] = {
    "write": "delta",
    "taps": 4,
    "q_activation": "silu",
    "k_activation": "silu",
    "v_activation": "silu",
    "q_norm": "l2",
    "k_norm": "l2",
    "beta": "sigmoid",
    "norm": True,
    "eps": 1e-6,
    "gate": "silu",
}


def gated_delta_net(H: int = 16, groups: int = 1, K: int = 32, V: int = 32, **changes: Any) -> FusedSpec:
    settings = {**DELTA_NET, "decay": "head", "decay_kind": "softplus", "scale": K**-0.5, **changes}
    return FusedSpec(H, H * groups, K, V, **settings)


def time_mixing(H: int, HV: int, K: int, V: int, **changes: Any) -> FusedSpec:
    return FusedSpec(H, HV, K, V, "add", "channel", apart=True, decay_kind="exponential", bonus=True, **changes)


def gated_slots(H: int, K: int, M: int, V: int, **changes: Any) -> FusedSpec:
    settings: dict[str, Any] = {"slots": M, "decay_kind": "logsigmoid", "decay_constant": 8.0, "v_activation": "silu"}
    settings |= {"norm": True, "joint_groups": 1, "eps": 1e-5, "gate": "sigmoid", "gate_first": True}
    return FusedSpec(H, H, K, V, "add", "channel", self_gated=True, **{**settings, **changes})


SPECS = {
    "gated_delta_net": gated_delta_net(8, 2, K=64, V=64),
    "gated_delta_net-split": gated_delta_net(1, 3, K=96, V=128, beta_factor=2.0),
    "delta_net": gated_delta_net(decay="none", decay_kind="given", gate="none", taps=3),
    "delta_product": gated_delta_net(8, 2, substeps=2),
    "comba": gated_delta_net(8, 2, K=64, reader=True, gate="sigmoid"),
    "comba-split": gated_delta_net(2, 2, K=96, V=64, reader=True, taps=0),
    "kda": gated_delta_net(16, decay="channel", gate="sigmoid"),
    "kda-bounded": gated_delta_net(4, 4, decay="channel", decay_kind="sigmoid", decay_constant=-5.0, V=64),
    "gla": FusedSpec(
        4, 4, 256, 512, "add", "channel", decay_kind="logsigmoid", decay_constant=16.0, norm=True, eps=1e-5, gate="silu"
    ),
    "rwkv6": time_mixing(16, 16, 64, 32, norm=True, centered=True, eps=1e-5, gate="silu"),
    "rwkv6-split": time_mixing(1, 2, 128, 256),
    "retention": FusedSpec(8, 8, 32, 64, "add", "head", norm=True, eps=1e-6),
    "linear": FusedSpec(16, 16, 192, 32, "add", "none", q_activation="silu", k_activation="silu"),
    "mamba2": FusedSpec(
        2,
        16,
        128,
        64,
        "add",
        "head",
        taps=4,
        q_activation="silu",
        k_activation="silu",
        v_activation="silu",
        decay_kind="softplus",
        shortest=0.01,
        longest=1.0,
        scales_values=True,
        skip=True,
        norm=True,
        joint_groups=2,
        eps=1e-5,
        gate="silu",
        gate_first=True,
    ),
    "mamba2-normless": FusedSpec(
        1, 16, 64, 32, "add", "head", decay_kind="softplus", scales_values=True, skip=True, gate="silu"
    ),
    "retention-grouped": FusedSpec(
        16, 16, 64, 64, "add", "head", repeats=4, rotary=64, scale=0.125, norm=True, eps=1e-6, gate="silu"
    ),
    "rotated-pairs": FusedSpec(16, 16, 64, 32, "add", "head", rotary=32, interleaved=True, apart=True),
    "slots": gated_slots(4, 256, 64, 256, features="silu"),
    "slots-conv": gated_slots(
        8,
        32,
        64,
        32,
        repeats=2,
        taps=4,
        q_activation="silu",
        k_activation="silu",
        v_activation="silu_twice",
        features="relu",
    ),
    "normalised": FusedSpec(16, 16, 32, 32, "add", "none", q_activation="elu", k_activation="elu", normalize=1e-6),
    "normalised-apart": FusedSpec(8, 16, 64, 64, "add", "none", apart=True, normalize=1e-6, norm=True, eps=1e-5),
    "forgetting": FusedSpec(
        4, 4, 32, 64, "add", "channel", q_activation="silu", decay_kind="forget", norm=True, eps=1e-6
    ),
    "forgetting-convolved": FusedSpec(
        8,
        8,
        32,
        64,
        "add",
        "channel",
        taps=4,
        q_activation="silu",
        decay_kind="forget",
        norm=True,
        joint_groups=1,
        eps=1e-5,
    ),
    "grouped-convolved": FusedSpec(
        16,
        16,
        32,
        32,
        "add",
        "channel",
        repeats=4,
        taps=4,
        q_activation="silu",
        k_activation="silu",
        v_activation="silu",
        features="relu",
        decay_kind="logsigmoid",
        decay_constant=16.0,
        decay_floor=-0.05,
    ),
    "dpfp": FusedSpec(8, 8, 128, 64, "add", "none", features="dpfp", k_norm="simplex", scale=0.1, norm=True, eps=1e-5),
    "dpfp-convolved": FusedSpec(16, 16, 256, 32, "add", "none", repeats=2, taps=3, features="dpfp"),
    "product": FusedSpec(16, 16, 64, 32, "add", "none", apart=True, repeats=2, features="product", k_norm="simplex"),
    "hedgehog": FusedSpec(
        16,
        16,
        64,
        32,
        "add",
        "none",
        apart=True,
        features="hedgehog",
        q_norm="simplex",
        k_norm="simplex",
        normalize=1e-10,
        norm=True,
        eps=1e-6,
    ),
    "sum": gated_delta_net(q_norm="sum", k_norm="sum", q_activation="relu", k_activation="elu", decay="none"),
    "rms": FusedSpec(
        8, 8, 64, 64, "add", "head", q_norm="rms", k_norm="rms", qk_eps=1e-5, rotary=32, scale=0.125, gate="sigmoid"
    ),
    "layer norm": FusedSpec(16, 16, 32, 64, "add", "head", norm=True, centered=True, eps=1e-5, gate="silu"),
    "relu": FusedSpec(16, 16, 32, 32, "delta", "none", q_activation="relu", k_activation="relu", beta_factor=0.5),
    "low_rank-head": FusedSpec(16, 16, 32, 32, "low_rank", "head", apart=True),
    "low_rank": FusedSpec(16, 16, 64, 64, "low_rank", "channel", apart=True),
}
SPECS["mamba2-80"] = replace(SPECS["mamba2"], value_dim=80)  # of Nemotron Nano; no multiple of a SIMD-group


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
        spec = SPECS[self.name]
        x = sample_mixer(spec, self.B, self.T, self.dtype)
        lengths = None if self.lengths is None else mx.array(self.lengths, dtype=mx.int32)
        bias = mx.random.normal((spec.width,), key=mx.random.key(7)).astype(self.dtype) if spec.taps == 3 else None
        x = replace(x, lengths=lengths, bias=bias)
        if self.strided:
            found = {f.name: z for f in fields(x) if (z := getattr(x, f.name)) is not None}
            x = Projected(**{name: _spread(z) for name, z in found.items()})
        return spec, x


def _spread(x: Any) -> Any:
    """The same numbers, every other element of the last axis in use."""
    return tuple(map(_spread, x)) if isinstance(x, tuple) else mx.stack([x, x], axis=-1)[..., 1]


PER_TOKEN = ("qkv", "decay", "beta", "gate")
CALLS = [
    Call("gated_delta_net", dtype=mx.bfloat16, strided=True),
    Call("gated_delta_net-split", T=3, B=2, lengths=(3, 1)),
    Call("delta_net", T=2, B=2, lengths=(0, 2), strided=True),
    Call("delta_product", T=5),
    Call("comba", T=1, dtype=mx.bfloat16, strided=True),
    Call("comba", T=6, dtype=mx.float16),
    Call("comba-split", T=4, B=2, lengths=(2, 4)),
    Call("kda", T=1, dtype=mx.float16),
    Call("kda-bounded", T=7, B=2, lengths=(7, 4)),
    Call("gla", T=1, dtype=mx.bfloat16),
    Call("rwkv6", T=1, dtype=mx.bfloat16, strided=True),
    Call("rwkv6", T=8, dtype=mx.float16),
    Call("rwkv6-split", T=4, B=2, lengths=(2, 4), strided=True),
    Call("retention", T=2, B=3),
    Call("linear", T=1),
    Call("mamba2", T=3, B=2, lengths=(3, 1), dtype=mx.bfloat16),
    Call("mamba2-80", T=3, B=2, lengths=(3, 1), dtype=mx.bfloat16),
    Call("mamba2-80"),
    Call("mamba2-normless", T=2, strided=True),
    Call("retention-grouped", T=3, B=2, lengths=(1, 3), strided=True),
    Call("rotated-pairs", T=2, dtype=mx.float16),
    Call("slots", T=1, dtype=mx.bfloat16, strided=True),
    Call("slots", T=7, B=2, lengths=(7, 0)),
    Call("slots-conv", T=5, B=2, lengths=(2, 5), strided=True, dtype=mx.float16),
    Call("normalised", T=3, B=2, lengths=(2, 0)),
    Call("normalised-apart", T=2, strided=True, dtype=mx.bfloat16),
    Call("forgetting", T=4, B=2, lengths=(4, 3), strided=True),
    Call("forgetting-convolved", T=2, B=2, lengths=(1, 2), strided=True),
    Call("forgetting-convolved", dtype=mx.bfloat16),
    Call("grouped-convolved", T=3, B=2, lengths=(3, 2)),
    Call("dpfp", T=4, B=2, lengths=(4, 0), strided=True),
    Call("dpfp-convolved", dtype=mx.float16),
    Call("product", T=3, strided=True),
    Call("hedgehog", T=5, B=2, lengths=(5, 3)),
    Call("hedgehog", dtype=mx.bfloat16, strided=True),
    Call("sum", T=2, dtype=mx.float16),
    Call("rms", T=3, B=2, lengths=(3, 2), strided=True),
    Call("layer norm", T=2, B=2, lengths=(1, 2), strided=True, dtype=mx.bfloat16),
    Call("relu", T=2),
    Call("low_rank", T=6, strided=True),
    Call("low_rank-head", T=2),
]


def assert_equal_mixed(spec: FusedSpec, x: Projected, found: Mixed) -> None:
    """At the tolerance of the dtype, against the twin in float32."""
    y, expected = found.y, mix(spec, in_float32(x))
    if not finishes(spec, y.shape[0]):
        y = finish(spec, x, y.astype(mx.float32)).astype(y.dtype)
    assert error(y, float64(expected.y)) < TOLERANCE[y.dtype]
    assert error(found.S, float64(expected.S)) < TOLERANCE[mx.float32]
    for other, wanted in ((found.Z, expected.Z), (found.S_keys, expected.S_keys)):
        if wanted is not None:
            assert other is not None and error(other, float64(wanted)) < TOLERANCE[mx.float32]
    if expected.memory is not None:
        assert found.memory is not None
        assert mx.array_equal(found.memory.astype(mx.float32), expected.memory.astype(mx.float32))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_decode_equals_operations(call: Call) -> None:
    spec, x = call.projected()
    assert_equal_mixed(spec, x, decode(spec, x))


@pytest.mark.parametrize(
    "name",
    [
        "gated_delta_net-split",
        "delta_product",
        "comba",
        "kda-bounded",
        "rwkv6-split",
        "retention-grouped",
        "low_rank",
        "forgetting-convolved",
        "product",
    ],
)
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


def test_b53_replaying_a_tape_gives_the_bits_of_the_keys_of_slots() -> None:
    spec, x = Call("slots-conv", T=4, B=2).projected()
    verified = decode(spec, x, tape=True)
    assert verified.tape is not None and x.S_keys is not None
    for counts in ([0, 4], [1, 3], [2, 2]):
        accepted = mx.array(counts)
        plain = decode(spec, replace(x, lengths=accepted))
        assert mx.array_equal(replay(spec, x.S, verified.tape, accepted), plain.S)
        assert mx.array_equal(replay_keys(spec, x.S_keys, verified.tape, accepted), plain.S_keys)


def test_each_head_may_have_a_norm_of_its_own() -> None:
    spec, x = Call("rwkv6", T=2).projected()
    gain, bias = (mx.random.normal((spec.value_heads * spec.value_dim,), key=mx.random.key(i)) for i in (1, 2))
    x = replace(x, norm=gain, norm_bias=bias)
    assert_equal_mixed(spec, x, decode(spec, x))


@pytest.mark.parametrize("name", ["gated_delta_net", "forgetting-convolved"])
def test_one_token_at_a_time_equals_all_at_once(name: str) -> None:
    spec, x = Call(name, T=4).projected()
    whole, outputs, S, memory = decode(spec, x), [], x.S, x.memory
    assert isinstance(x.qkv, mx.array)
    for t in range(4):
        token = {part: z[:, t : t + 1] for part in PER_TOKEN if (z := getattr(x, part)) is not None}
        one = decode(spec, replace(x, **token, S=S, memory=memory))
        outputs.append(one.y)
        S, memory = one.S, one.memory
    assert mx.array_equal(mx.concatenate(outputs, axis=1), whole.y)
    assert mx.array_equal(S, whole.S)
    assert memory is not None and whole.memory is not None and mx.array_equal(memory, whole.memory)


@pytest.mark.parametrize("name", ["kda-bounded", "forgetting-convolved", "dpfp", "layer norm"])
def test_padding_is_never_read(name: str) -> None:
    spec, x = Call(name, T=3).projected()
    assert isinstance(x.qkv, mx.array)
    found = {part: z for part in PER_TOKEN if (z := getattr(x, part)) is not None}
    real = decode(spec, replace(x, **{part: z[:, :2] for part, z in found.items()}))
    spoilt = {part: mx.concatenate([z[:, :2], mx.full_like(z[:, :1], mx.nan)], axis=1) for part, z in found.items()}
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
