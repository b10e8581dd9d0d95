"""Recurrent mixers of every kind decode by the kernels as they do by operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from mlxlin import recurrences
from mlxlin.backend import mx
from mlxlin.models.mixers.fused import decoding, fusion
from mlxlin.models.mixers.linear import LinearMixer, linear_parameters
from mlxlin.models.mixers.step import Step
from mlxlin.models.params import Params
from mlxlin.models.spec import (
    AttentionSpec,
    DecaySpec,
    LinearSpec,
    MixerSpec,
    NormSpec,
    OutputSpec,
    RopeSpec,
    Rwkv6Spec,
    Rwkv7Spec,
    SlotSpec,
)
from mlxlin.recurrences import mixer

from .measure import launches_of

WIDTH = 48
NORM = NormSpec(1e-6)
GATED = OutputSpec(NORM, "silu")
JOINT = OutputSpec(NORM, "sigmoid", joint=True, groups=2)
PLAIN = LinearSpec("linear", 2, 4, 32, 32, 1.0, OutputSpec(NORM))


def retention(**changes: Any) -> LinearSpec:
    decay = DecaySpec("retention")
    return replace(PLAIN, rule="decay", heads=4, scale=0.2, decay=decay, rope=RopeSpec(32), output=GATED, **changes)


@dataclass(frozen=True)
class Expected:
    """A mixer, its dispatches beside `decode`, and those around the recurrence of a prompt."""

    spec: LinearSpec
    after: tuple[str, ...] = ("gated_norm",)  # few heads are split over threadgroups, so the norm is apart
    prompt: tuple[str, ...] = ("prefill", "gated_norm")


FORGET = DecaySpec("forget", vector=True, bounds=3, layer=2)
STEPS = DecaySpec("softplus", scales_values=True, shortest=0.01, longest=0.5)
MAMBA = OutputSpec(NORM, "silu", joint=True, groups=2, gate_first=True)
MIXERS = {
    "linear": Expected(PLAIN, prompt=("gated_norm",)),
    "linear, elu and normaliser": Expected(replace(PLAIN, features="elu", normalize=True)),
    "linear, hedgehog": Expected(
        replace(PLAIN, heads=4, kv_heads=2, features="hedgehog", normalize=True, simplex_q=True, simplex_k=True)
    ),
    "linear, t2r": Expected(
        replace(PLAIN, features="t2r", tied_features=True, output=OutputSpec(None)), (), ("prefill",)
    ),
    "linear, product": Expected(replace(PLAIN, features="hadamard")),
    "linear, dpfp": Expected(
        replace(PLAIN, key_dim=16, features="dpfp", simplex_k=True, output=OutputSpec(NormSpec(1e-6, affine=False)))
    ),
    "linear, simplex": Expected(replace(PLAIN, features="relu", simplex_q=True)),
    "retention": Expected(retention()),
    "retention, grouped heads": Expected(retention(kv_heads=2)),
    "retention, layer norm": Expected(replace(retention(), output=OutputSpec(NormSpec(1e-5, "layer"), "silu"))),
    "retention, layer norm of every head": Expected(
        replace(retention(), heads=16, value_heads=16, output=OutputSpec(NormSpec(1e-5, "layer"), "silu")), ()
    ),
    "lightning": Expected(
        replace(PLAIN, rule="decay", features="silu", v_activation="silu", decay=DecaySpec("geometric"), output=JOINT)
    ),
    "lightning, normed and rotated": Expected(
        replace(retention(), qk_norm="rms", qk_eps=1e-5, decay=DecaySpec("alibi"), output=JOINT)
    ),
    "gla, grouped heads": Expected(
        replace(
            PLAIN,
            rule="gated",
            heads=4,
            kv_heads=2,
            decay=DecaySpec("logsigmoid", vector=True, rank=8, divisor=16.0),
            output=OutputSpec(NormSpec(1e-6, affine=False), "silu"),
        ),
    ),
    "gla, grouped heads behind a convolution": Expected(
        replace(
            PLAIN,
            rule="gated",
            heads=4,
            kv_heads=2,
            conv=4,
            qk_activation="silu",
            v_activation="silu",
            features="relu",
            decay=DecaySpec("logsigmoid", vector=True, rank=8, divisor=16.0, floor=-0.05),
            output=GATED,
        ),
    ),
    "hgrn2": Expected(replace(PLAIN, rule="gated", value_heads=2, features="silu_q", decay=FORGET, output=JOINT)),
    "hgrn2, convolution": Expected(
        replace(PLAIN, rule="gated", value_heads=2, conv=4, features="silu_q", decay=FORGET, output=OutputSpec(NORM))
    ),
    "hgrn2, convolution without bounds": Expected(
        replace(PLAIN, rule="gated", value_heads=2, conv=3, decay=DecaySpec("forget", vector=True), output=JOINT)
    ),
    "delta, fixed beta": Expected(replace(PLAIN, rule="delta", qk_norm="sum", beta=0.5, beta_projection=False)),
    "comba": Expected(
        replace(
            PLAIN,
            rule="comba",
            scale=0.2,
            conv=4,
            qk_activation="silu",
            v_activation="silu",
            qk_norm="l2",
            decay=DecaySpec("softplus"),
            beta=1.0,
            output=OutputSpec(NORM, "sigmoid"),
        )
    ),
    "mamba2": Expected(
        replace(
            PLAIN,
            rule="decay",
            value_heads=16,
            conv=4,
            conv_bias=True,
            qk_activation="silu",
            v_activation="silu",
            decay=STEPS,
            skip="head",
            output=MAMBA,
        )
    ),
    "mamba2, normless": Expected(
        replace(PLAIN, rule="decay", value_heads=16, decay=STEPS, skip="channel", output=OutputSpec(None, "silu")), ()
    ),
}


def mixer_of(spec: LinearSpec) -> LinearMixer:
    key, arrays = mx.random.key(2), {}
    for name, parameter in linear_parameters(spec, WIDTH).items():
        key, own = mx.random.split(key)
        arrays[name] = mx.random.normal(parameter.shape, key=own) * 0.3
    return LinearMixer(spec, Params(arrays, {}), WIDTH, mx.float32)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_decodes_by_kernels_as_by_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = MIXERS[name]
    built = mixer_of(expected.spec)
    x = mx.random.normal((2, 7, WIDTH), key=mx.random.key(3))
    _, state = built(x[:, :5], built.fresh(2), Step(5, mx.zeros((2,), mx.int32)))
    step = Step(2, mx.full((2,), 5), mx.array([2, 1]))
    y, plain = built(x[:, 5:], state, step)
    monkeypatch.setattr(mixer, "on_metal", lambda: True)
    monkeypatch.setattr(mixer, "trusted_by_key", lambda *_: True)
    found: list[Any] = []
    launches = launches_of(lambda: found.extend(built(x[:, 5:], state, step)))
    assert [launch.name for launch in launches] == ["decode", *expected.after]
    real = mx.array([[1.0, 1.0], [1.0, 0.0]])[..., None]
    pairs = [(found[0] * real, y * real), *((found[1][part], plain[part]) for part in plain)]
    assert set(found[1]) == set(plain)
    for a, b in pairs:
        assert float(mx.sqrt(mx.square(a - b).mean())) < 1e-5 * float(mx.sqrt(mx.square(b).mean()))


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_reads_a_prompt_by_kernels_as_by_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, length, lengths = MIXERS[name], 19, mx.array([19, 7])
    built = mixer_of(expected.spec)
    x = mx.random.normal((2, length, WIDTH), key=mx.random.key(3))
    step = Step(length, mx.zeros((2,), mx.int32), lengths)
    y, plain = built(x, built.fresh(2), step)
    monkeypatch.setattr(mixer, "on_metal", lambda: True)
    monkeypatch.setattr(mixer, "trusted_by_key", lambda *_: True)
    found: list[Any] = []
    launches = launches_of(lambda: found.extend(built(x, built.fresh(2), step)))
    assert [launch.name for launch in launches] == list(expected.prompt)  # `run` itself knows of no Metal here
    real = (mx.arange(length) < lengths[:, None])[..., None]
    pairs = [(mx.where(real, found[0], 0), mx.where(real, y, 0)), *((found[1][part], plain[part]) for part in plain)]
    assert set(found[1]) == set(plain)
    for a, b in pairs:
        assert float(mx.sqrt(mx.square(a - b).mean())) < 1e-5 * float(mx.sqrt(mx.square(b).mean()))


@pytest.mark.parametrize("name", MIXERS)
def test_what_a_probe_runs_is_what_the_mixer_runs(name: str) -> None:
    """The sample has the inputs of the mixer: a kernel is compiled for which inputs there are."""
    fused = fusion(MIXERS[name].spec)
    assert fused is not None
    assert recurrences.mixer.complaint(fused, recurrences.samples.sample_mixer(fused, 2, 2, mx.float32)) == ""


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (MIXERS["linear"].spec, "two kernels, the second for the norm"),  # few heads
        (replace(PLAIN, value_heads=16), "one kernel"),
        (MIXERS["mamba2"].spec, "two kernels, the second for the norm"),
        (MIXERS["hgrn2, convolution"].spec, "two kernels, the second for the norm"),
        (MIXERS["linear, t2r"].spec, "one kernel; matrix products for the feature map"),
        (replace(retention(), qk_norm="sum"), "operations, a kernel for the recurrence where there is one"),  # no order
        (replace(PLAIN, key_dim=16), "operations, a kernel for the recurrence where there is one"),
        (Rwkv6Spec(16, 32, 64, 8, 8, 1e-5), "one kernel"),
        (SlotSpec(16, 4, 32, 64, 64, 8.0, NORM), "two kernels, the second for the norm"),
        (SlotSpec(16, 4, 32, 64, 48, 8.0, NORM), "operations, a kernel for the recurrence where there is one"),
        (Rwkv7Spec(2, 64, 8, 8, 8, 8, 1e-5, 1e-6), "one kernel"),
        (AttentionSpec(2, 2, 64, 0.125), "attention of MLX"),
    ],
)
def test_people_are_told_what_decodes_a_mixer(spec: MixerSpec, text: str) -> None:
    assert decoding(spec) == text
