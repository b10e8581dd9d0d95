"""Every head size with every rule through both recurrence kernels, with every feature map through decode and prefill.

Run by `pytest -m full -n auto tests/metal`, in a quarter of an hour on two cores.
The default tests cover the same features in pairs. Groups, dtypes and token counts turn with the sizes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import decode
from mlxlin.metal.mixer import FusedSpec
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import SIZES, VALUE_SIZES
from mlxlin.recurrences import RULES, kernels, probe
from mlxlin.recurrences.mixer import arguments, in_float32
from mlxlin.recurrences.samples import sample_mixer

from .cases import TOLERANCE, Case, error, float64
from .conftest import emulated
from .test_chunk import LENGTHS, assert_chunk_equals_reference
from .test_decode import Call, assert_equal_mixed
from .test_scan import assert_scan_equals_reference
from .test_schedules import MIXERS, bits

pytestmark = pytest.mark.full

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
RULES_AND_DECAYS = [(rule.name, decay) for rule in RULES.values() for decay in rule.decays]


def case_of(turn: int, rule: str, decay: str, K: int, V: int) -> Case:
    return Case(
        rule,
        T=LENGTHS[turn % len(LENGTHS)],
        B=1 + turn % 2,
        groups=1 + turn % 4,
        K=K,
        V=V,
        dtype=DTYPES[turn % 3],
        decay=decay,
        keys=("random", "correlated")[turn % 2],
        gates=("mixed", "mild")[turn // 2 % 2],
        beta=(None, 2.0, 0.5)[turn % 3],
        substeps=1 + turn % 3 if RULES[rule].substeps else 1,
        strided=turn % 5 == 0,
    )


CASES = [
    case_of(turn, rule, decay, K, V)
    for turn, ((rule, decay), K, V) in enumerate(product(RULES_AND_DECAYS, SIZES, VALUE_SIZES))
]

CHUNKED = [case for case in CASES if case.decay in kernels.CHUNKED]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scan(case: Case) -> None:
    assert_scan_equals_reference(case)


@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_chunk(case: Case) -> None:
    assert_chunk_equals_reference(case)


@pytest.mark.parametrize(("rule", "decay"), RULES_AND_DECAYS)
@pytest.mark.parametrize("metal", [320, 400, 410])
def test_every_language_version(rule: str, decay: str, metal: int) -> None:
    with emulated(metal=metal):
        case = Case(rule, T=35, decay=decay, gates="mixed", keys="correlated")
        assert_scan_equals_reference(case)
        if decay in kernels.CHUNKED:
            assert_chunk_equals_reference(case)


@pytest.mark.parametrize(("rule", "decay"), RULES_AND_DECAYS)
def test_every_schedule(rule: str, decay: str) -> None:
    check = assert_chunk_equals_reference if decay in kernels.CHUNKED else assert_scan_equals_reference
    for order in range(8):
        with emulated(order=order):
            check(Case(rule, T=35, decay=decay, gates="mixed", keys="correlated"))


@pytest.mark.parametrize(("kernel", "call"), MIXERS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_every_mixer_in_every_language_version_under_every_schedule(kernel: Any, call: Call) -> None:
    expected = bits(kernel, call)
    for options in (*({"metal": metal} for metal in (320, 400, 410)), *({"order": order} for order in range(1, 8))):
        with emulated(**options):
            assert all(mx.array_equal(a, b) for a, b in zip(bits(kernel, call), expected, strict=True)), options


def test_every_kind_of_sample_the_probe_uses() -> None:
    from mlxlin.recurrences import kernels
    from mlxlin.recurrences.samples import sample

    for (rule, decay), dtype in product(RULES_AND_DECAYS, DTYPES):
        x = sample(rule, decay, 64, 64, 2, 35, dtype)  # type: ignore[arg-type]
        assert probe.complaint(kernels.scan, x) == ""
        if decay in kernels.CHUNKED:
            assert probe.complaint(kernels.chunk, x) == ""


FEATURES = ("none", "relu", "dpfp", "product", "hedgehog")
NORMS = ("none", "l2", "sum", "simplex", "rms")


FEATURES_AND_SIZES = [(i, *pair) for i, pair in enumerate(product(SIZES, FEATURES))]


def mixer_of(turn: int, K: int, features: Any) -> FusedSpec:
    """Norms of vectors, a convolution and grouped heads, or streams apart, turn with them."""
    apart, norm = turn % 3 == 0, cast(Any, NORMS[(turn + turn // 5) % 5])
    return FusedSpec(
        16,
        16,
        K,
        VALUE_SIZES[turn % 6],
        ("add", "delta")[turn % 2],
        "none",
        apart=apart,
        repeats=1 + turn % 2,
        taps=0 if apart or norm == "simplex" else (0, 2, 3, 4)[turn % 4],
        features=features,
        q_norm=norm,
        k_norm="l2" if norm == "none" else norm,
        qk_eps=1e-6,
        norm=turn % 4 > 0,
        centered=turn % 4 > 1,
        eps=1e-6,
        gate=("silu", "sigmoid")[turn % 2],
    )


@pytest.mark.parametrize(("turn", "K", "features"), FEATURES_AND_SIZES)
def test_decode_with_features(turn: int, K: int, features: Any) -> None:
    spec = mixer_of(turn, K, features)
    x = sample_mixer(spec, 2, 1 + turn % 2, DTYPES[turn % 3])
    assert_equal_mixed(spec, x, decode(spec, x))


@pytest.mark.parametrize(("turn", "K", "features"), FEATURES_AND_SIZES)
def test_prefill_with_features(turn: int, K: int, features: Any) -> None:
    spec = mixer_of(turn, K, features)
    x = replace(sample_mixer(spec, 2, 2 + turn % 4, DTYPES[turn % 3]), lengths=None)
    found, (expected, memory) = prefill(spec, x), arguments(spec, in_float32(x))
    for name, wanted in expected.items():
        array = getattr(found, name)
        assert error(array, float64(wanted)) < TOLERANCE[array.dtype]
    if memory is not None:
        assert found.memory is not None and error(found.memory, float64(memory)) == 0


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("turn", "K"), list(enumerate(SIZES)))
def test_prefill_of_what_is_rotated_or_forgets(turn: int, K: int, rotary: bool) -> None:
    kind: dict[str, Any] = {"rotary": (K, K // 2)[turn % 2], "interleaved": turn % 3 == 0, "decay": "head"}
    kind = kind if rotary else {"decay_kind": "forget", "taps": 4 * (turn % 2), "decay": "channel"}
    spec = FusedSpec(8, 8, K, VALUE_SIZES[-turn], "add", repeats=1 + turn % 2, scale=0.5, **kind)
    x = replace(sample_mixer(spec, 1, 3, DTYPES[turn % 3]), lengths=None)
    found, (expected, _) = prefill(spec, x), arguments(spec, in_float32(x))
    for name, wanted in expected.items():
        array = getattr(found, name)
        assert error(array, float64(wanted)) < TOLERANCE[array.dtype]
