"""What stands before a recurrence, for many tokens in one dispatch, against the same in plain operations; and mixers
over prompts by kernels alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.metal.mixer import FusedSpec, Projected
from mlxlin.metal.prefill import prefill
from mlxlin.recurrences import kernels
from mlxlin.recurrences.mixer import arguments, by_kernels, in_float32, mix, time_step

from .cases import TOLERANCE, error, float64
from .measure import launches_of
from .test_decode import SPECS, Call

CALLS = [
    Call("gated_delta_net", T=9, B=2, dtype=mx.bfloat16, lengths=(9, 3), strided=True),
    Call("gated_delta_net-split", T=1),
    Call("delta_net", T=2, B=2, lengths=(0, 2)),
    Call("delta_product", T=5, strided=True),
    Call("comba", T=3, dtype=mx.bfloat16, strided=True),
    Call("comba-split", T=4, B=2, lengths=(2, 4)),
    Call("kda-bounded", T=7, B=2, dtype=mx.float16, lengths=(7, 4)),
    Call("gla", T=3),
    Call("rwkv6", T=3, B=2, lengths=(2, 3), strided=True),
    Call("rwkv6-split", T=2, dtype=mx.bfloat16),
    Call("linear", T=2, B=2, lengths=(1, 2)),
    Call("mamba2", T=5, B=2, dtype=mx.bfloat16, lengths=(5, 2), strided=True),
    Call("mamba2-80", T=5, B=2, dtype=mx.bfloat16, lengths=(5, 2), strided=True),
    Call("mamba2-normless", T=3, B=2, lengths=(2, 3)),
    Call("retention-grouped", T=3, B=2, lengths=(1, 3), strided=True),
    Call("rotated-pairs", T=4, dtype=mx.float16),
    Call("normalised", T=3, B=2, lengths=(2, 0), dtype=mx.bfloat16),
    Call("forgetting", T=4, B=2, lengths=(4, 3), strided=True),
    Call("forgetting-convolved", T=6, B=2, lengths=(6, 1), strided=True),
    Call("grouped-convolved", T=5, B=2, lengths=(2, 5), dtype=mx.float16),
    Call("dpfp", T=4, B=2, lengths=(4, 0), strided=True),
    Call("dpfp-convolved", T=3),
    Call("product", T=3, strided=True),
    Call("hedgehog", T=5, B=2, lengths=(5, 3)),
    Call("sum", T=2, dtype=mx.float16),
    Call("rms", T=3, B=2, lengths=(3, 2), strided=True),
    Call("relu", T=4),
    Call("slots", T=2, B=2, lengths=(2, 1)),
    Call("slots-conv", T=5, B=2, lengths=(1, 5), strided=True),
]
# what is not copied, for it is projected as it is needed
VIEWS = {
    "gla": "qkv",
    "linear": "v",
    "mamba2-normless": "qk",
    "retention": "qkvg",
    "retention-grouped": "g",
    "rotated-pairs": "vg",
    "normalised": "v",
    "normalised-apart": "qkv",
    "forgetting": "v",
    "dpfp": "v",
    "hedgehog": "v",
    "rms": "vg",
    "layer norm": "qkvg",
    "low_rank": "qkvgab",
    "low_rank-head": "qkvgab",
}
ARGUMENTS = ("q", "k", "v", "g", "beta", "a", "b", "lost")


def expected_of(spec: FusedSpec, x: Projected) -> dict[str, Any]:
    """What the kernel should make, by the names of `Prepared`, padding aside."""
    given: dict[str, Any]
    given, memory = arguments(spec, x)
    q, k, v = (given[name] for name in "qkv")
    bypass = None if x.skip is None else (x.skip, v)
    if spec.slots:
        given["lost"] = -mx.expm1(given["g"])
    if spec.reader:  # as a low-rank write, by value heads
        beta = given.pop("beta")[..., None]
        given |= {name: mx.repeat(given[name], spec.value_heads // spec.heads, axis=2) for name in "qka"}
        given |= {"v": beta * v, "b": -beta * given["k"]}
    if spec.scales_values:
        given["v"] = v * time_step(spec, x)[..., None]
    if x.bonus is not None:
        own = (q * k * x.bonus).sum(axis=-1, keepdims=True)
        bypass = (mx.repeat(own, spec.value_heads // spec.heads, axis=2), v)
        late = {name: mx.pad(given[name], [(0, 0), (1, 0), (0, 0), (0, 0)]) for name in "kvg"}
        given |= late | {"q": mx.pad(q, [(0, 0), (0, 1), (0, 0), (0, 0)])}
    return {**dict.fromkeys(ARGUMENTS), **given, "bypass": bypass, "memory": memory}


def assert_equal_where_real(call: Call, found: mx.array, expected: mx.array, *, zero: bool, late: int = 0) -> None:
    """At the tolerance of the dtype, for all tokens of each row; behind them zero where a kernel `zero`es."""
    lengths = mx.array([call.T] * call.B if call.lengths is None else call.lengths)
    slots = call.T + late
    real = mx.arange(slots) < lengths[:, None] + late
    real = mx.repeat(real, found.shape[1] // slots, axis=1)
    real = real.reshape(*real.shape, *[1] * (found.ndim - 2))
    found = found if zero else mx.where(real, found, mx.zeros((), found.dtype))
    assert error(found, float64(mx.where(real, expected, mx.zeros(())))) < TOLERANCE[found.dtype]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_prefill_equals_operations(call: Call) -> None:
    spec, x = call.projected()
    found, expected = prefill(spec, x), expected_of(spec, in_float32(x))
    for name in ARGUMENTS:
        array, wanted = getattr(found, name), expected[name]
        assert (array is None) == (wanted is None)
        if array is None or wanted is None:
            continue
        assert array.dtype == (mx.float32 if name in ("g", "beta", "lost") else call.dtype)
        late = int(spec.bonus) if name != "q" else 0
        array, wanted = (z[:, : call.T] if name == "q" else z for z in (array, wanted))
        assert_equal_where_real(call, array, wanted, zero=name not in VIEWS.get(call.name, ""), late=late)
    assert (found.bypass is None) == (expected["bypass"] is None)
    if found.bypass is not None:
        products = (factor * v.astype(mx.float32) for factor, v in (found.bypass, expected["bypass"]))
        assert_equal_where_real(call, *(z.astype(call.dtype) for z in products), zero=True)
    if expected["memory"] is not None:
        assert found.memory is not None
        assert mx.array_equal(found.memory.astype(mx.float32), expected["memory"].astype(mx.float32))


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_projected_as_it_is_needed_is_not_copied(name: str) -> None:
    spec, x = Call(name, T=2).projected()
    launches = launches_of(lambda: prefill(spec, x))
    written = {buffer for launch in launches for buffer, use in launch.report.buffers.items() if use.stored}
    found = {argument for argument in ARGUMENTS if getattr(prefill(spec, x), argument) is not None}
    assert written - {"bypassing"} == found - set(VIEWS[name])
    assert len(launches) == bool(written)


def test_padding_is_never_read() -> None:
    spec, x = Call("mamba2", T=4, B=1).projected()
    projections = {name: z for name in ("qkv", "decay") if isinstance(z := getattr(x, name), mx.array)}
    spoilt = {name: mx.concatenate([z[:, :2], mx.full_like(z[:, 2:], mx.nan)], 1) for name, z in projections.items()}
    found = prefill(spec, replace(x, **spoilt, lengths=mx.array([2])))
    short = prefill(spec, replace(x, **{name: z[:, :2] for name, z in projections.items()}))
    assert found.bypass is not None and short.bypass is not None
    pairs = [(found.v, short.v), (found.k, short.k), (found.g, short.g), (found.bypass[1], short.bypass[1])]
    for array, wanted in pairs:
        assert array is not None and wanted is not None
        assert mx.array_equal(array[:, :2], wanted) and mx.all(array[:, 2:] == 0)
    assert found.memory is not None and short.memory is not None and mx.array_equal(found.memory, short.memory)


WHOLE = [
    Call("gated_delta_net", T=35, dtype=mx.bfloat16),
    Call("delta_product", T=20, B=2, lengths=(20, 3)),
    Call("comba", T=34, dtype=mx.float16),
    Call("gla", T=17, dtype=mx.bfloat16),
    Call("rwkv6", T=33, B=2, lengths=(33, 16), dtype=mx.bfloat16),
    Call("rwkv6-split", T=18, B=2, lengths=(18, 2)),
    Call("retention", T=33),
    Call("mamba2", T=40, B=2, dtype=mx.bfloat16, lengths=(40, 18)),
    Call("mamba2", T=17, B=2, lengths=(3, 17), strided=True),
    Call("mamba2-80", T=33, B=2, lengths=(33, 9)),
    Call("mamba2-normless", T=33, B=2, lengths=(33, 9)),
    Call("retention-grouped", T=37, B=2, lengths=(1, 37), strided=True),
    Call("rotated-pairs", T=32, dtype=mx.float16),
    Call("normalised", T=33, B=2, lengths=(33, 0)),
    Call("normalised-apart", T=18, strided=True, dtype=mx.bfloat16),
    Call("forgetting", T=39, B=2, lengths=(39, 13), dtype=mx.bfloat16),
    Call("forgetting-convolved", T=20, B=2, lengths=(2, 20)),
    Call("hedgehog", T=18, B=2, lengths=(18, 5)),
    Call("rms", T=33, dtype=mx.float16),
    Call("layer norm", T=35, B=2, lengths=(35, 8), dtype=mx.bfloat16),
    Call("slots-conv", T=19, B=2, lengths=(19, 4)),
    Call("low_rank", T=33, strided=True),
    Call("low_rank-head", T=21),
]


@pytest.mark.parametrize("call", WHOLE, ids=str)
def test_a_prompt_by_kernels_equals_operations(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_metal", lambda: True)
    monkeypatch.setattr(kernels, "trusted", lambda *_: True)
    spec, x = call.projected()
    found, expected = by_kernels(spec, x), mix(spec, in_float32(x))
    # q, k, v are rounded to the dtype of the projections before the recurrence
    for array, wanted in (
        (found.y, expected.y),
        (found.S, expected.S),
        (found.Z, expected.Z),
        (found.S_keys, expected.S_keys),
    ):
        assert (array is None) == (wanted is None)
        if array is not None and wanted is not None:
            assert error(array, float64(wanted)) < TOLERANCE[call.dtype]


def test_every_specification_is_prepared() -> None:
    """The calls above name them all."""
    assert {call.name for call in (*CALLS, *WHOLE)} | {"kda"} == set(SPECS)
