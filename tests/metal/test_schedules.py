"""Results that depend on nothing but the inputs: not on the order of threads, the language version, or alignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from mlxlin import recurrences
from mlxlin.backend import mx
from mlxlin.metal.decode import decode, replay, replay_keys
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.mixer import FusedSpec
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import chunk, scan
from mlxlin.metal.rwkv7 import finish, prepare, time_mix
from mlxlin.recurrences import mixer, rwkv7
from mlxlin.recurrences.samples import sample_mixer

from . import test_decode, test_prefill, test_rwkv7
from .cases import Case, arguments
from .conftest import emulated
from .test_decode import Call
from .test_layers import normal

Arrays = list[mx.array]


def flat(x: Any) -> Arrays:
    """The arrays of a kernel's results."""
    if isinstance(x, mx.array):
        return [x]
    parts = x if isinstance(x, tuple) else () if x is None else vars(x).values()
    return [z for part in parts for z in flat(part)]


def run_scan() -> Arrays:
    rules = ("kda", "gated_values", "dplr", "comba")
    cases = [Case(rule, T=3, B=2, lengths=(3, 2), gates="mixed") for rule in rules]
    cases.append(Case("delta_product", T=3, substeps=2, dtype=mx.float16))
    found = [scan(arguments(case.inputs())) for case in cases]
    found.append(scan(arguments(Case("linear", T=3, normalize=True).inputs()), normalize=True, eps=1e-6))
    return [z for result in found for z in result if z is not None]


def run_chunk_head() -> Arrays:
    case = Case("gated_delta", T=17, H=2, V=64, gates="mixed", keys="correlated", dtype=mx.bfloat16)
    others = [Case("delta_product", T=9, substeps=2, groups=3, lengths=(8,)), Case("linear", T=17)]
    return [z for one in (case, *others) for z in chunk(arguments(one.inputs()))]


def run_chunk_channel() -> Arrays:
    cases = [Case(rule, T=18, gates="mixed", groups=1) for rule in ("dplr", "kda", "gated")]
    return [z for case in cases for z in chunk(arguments(case.inputs()))]


def run_chunk_columns() -> Arrays:
    x = arguments(Case("kda", T=18, V=64).inputs()), arguments(Case("decay", T=18, V=64).inputs())
    return [z for one in x for columns in (2, 4) for z in chunk(one, columns=columns)]


def run_decode() -> Arrays:
    return flat(decode(*Call("gated_delta_net-split", T=3, B=2, lengths=(3, 1)).projected(), tape=True))


def run_replay() -> Arrays:
    found: Arrays = []
    for name in ("low_rank", "delta_product", "slots-conv"):
        spec, x = Call(name, T=3, B=2).projected()
        tape, accepted = decode(spec, x, tape=True).tape, mx.array([1, 3])
        assert tape is not None
        found += [*flat(tape), replay(spec, x.S, tape, accepted)]
        if x.S_keys is not None:
            found.append(replay_keys(spec, x.S_keys, tape, accepted))
    return found


def run_layers() -> Arrays:
    x = normal(1, 2, 1000)
    layer_normed = add_norm(x, x, x[0, 0], 1e-6, centered=True, bias=x[0, 1])
    bounded = gated_norm(x, x, x[0, 0], 1e-6, groups=4, gate_first=True, activation="silu", lengths=mx.array([1]))
    return [
        *layer_normed,
        bounded,
        *add_norm(x, x, x[0, 0], 1e-6),
        gated_norm(x, x, x[0, 0], 1e-6),
        gated_norm(x, x, None, None, activation="silu", groups=5, skip=x[0, 0, :10, None], v=x.reshape(1, 2, 10, 100)),
        *router_topk(normal(1, 9, 64), 4),
        *router_topk(normal(1, 9, 64), 4, score="sigmoid", correction=normal(64, seed=1), groups=8, groups_kept=2),
    ]


RUNS = [
    run_scan,
    run_chunk_head,
    run_chunk_channel,
    run_chunk_columns,
    run_decode,
    run_replay,
    run_layers,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_bits_do_not_depend_on_the_schedule(run: Callable[[], Arrays]) -> None:
    expected = run()
    for order in (3, 5, 6):
        with emulated(order=order):
            assert all(mx.array_equal(a, b) for a, b in zip(run(), expected, strict=True)), order


# every option of a mixer, and every piece of a kernel's text
MIXERS = [*((decode, call) for call in test_decode.CALLS), *((prefill, call) for call in test_prefill.CALLS)]
PIECES = {"comba", "delta_product", "dpfp", "forgetting-convolved", "kda-bounded", "layer norm", "mamba2", "normalised"}
PIECES |= {"product", "retention-grouped", "rms", "rwkv6", "slots-conv", "sum"}


def bits(kernel: Callable[..., Any], call: Call) -> Arrays:
    return flat(kernel(*call.projected()))


@pytest.mark.parametrize(("kernel", "call"), MIXERS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_bits_of_no_mixer_depend_on_the_schedule(kernel: Callable[..., Any], call: Call) -> None:
    expected = bits(kernel, call)
    for order in (3, 5, 6):
        with emulated(order=order):
            assert all(mx.array_equal(a, b) for a, b in zip(bits(kernel, call), expected, strict=True)), order


@pytest.mark.parametrize(
    ("kernel", "call"), [m for m in MIXERS if m[1].name in PIECES], ids=lambda x: getattr(x, "__name__", str(x))
)
def test_bits_of_no_mixer_depend_on_language_version_and_alignment(kernel: Callable[..., Any], call: Call) -> None:
    expected = bits(kernel, call)
    with emulated(metal=410, align=1):
        assert all(mx.array_equal(a, b) for a, b in zip(bits(kernel, call), expected, strict=True))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_bits_do_not_depend_on_language_version_and_alignment(run: Callable[[], Arrays]) -> None:
    """Metal 4.1 is macOS 27's; buffers aligned to their elements prove that no wider access relies on more."""
    expected = run()
    with emulated(metal=410, align=1):
        assert all(mx.array_equal(a, b) for a, b in zip(run(), expected, strict=True))


@pytest.mark.parametrize("T", [3, 4])  # g and beta have 6 and 8 elements: constant and device address space
@pytest.mark.parametrize("B", [1, 8])  # as have the lengths
def test_inputs_around_the_size_where_the_address_space_changes(T: int, B: int) -> None:
    from .test_chunk import assert_chunk_equals_reference
    from .test_scan import assert_scan_equals_reference

    case = Case("gated_delta", T=T, B=B, lengths=(T,) * B)
    assert_scan_equals_reference(case)
    assert_chunk_equals_reference(case)


@pytest.mark.parametrize("n", [7, 8])
def test_mixers_around_the_size_where_the_address_space_changes(n: int) -> None:
    """n numbers per head of a token, n angles, n lengths, n counts of accepted tokens; twice n - 4 of a reader."""
    gates = test_decode.gated_delta_net(n, beta_factor=2.0)
    rotated = FusedSpec(n, n, 32, 32, "add", "head", rotary=2 * n, decay_kind="softplus", scales_values=True, skip=True)
    reading = test_decode.gated_delta_net(n - 4, reader=True)
    for spec, B in ((gates, 1), (rotated, 1), (reading, 1), (gates, n)):
        x = sample_mixer(spec, B, 1, mx.float32)
        x = replace(x, lengths=mx.array([1] * (B - 1) + [0]) if B > 1 else None)
        found = decode(spec, x, tape=True)
        test_decode.assert_equal_mixed(spec, x, found)
        assert found.tape is not None
        assert mx.array_equal(replay(spec, x.S, found.tape, mx.full((B,), 1)), found.S)
        assert mixer.complaint(spec, sample_mixer(spec, B, mixer.longest(spec, B) + 1, mx.float32)) == ""


@pytest.mark.parametrize("n", [7, 8])
def test_rwkv7_and_norms_around_the_size_where_the_address_space_changes(n: int) -> None:
    x, lengths = rwkv7.sample(1, 32, 1, mx.float32), mx.array([1] * (n - 1) + [0])
    rows = {f.name: mx.repeat(z[:1], n, axis=0) for f in fields(x) if isinstance(z := getattr(x, f.name), mx.array)}
    many = replace(x, lengths=lengths, **{name: rows[name] for name in (*test_rwkv7.PER_TOKEN, "S")})
    y, S = rwkv7.mix(x)
    found, ready = time_mix(many), prepare(many)
    out, after = recurrences.run("dplr", ready.q, ready.k, ready.v, g=ready.g, a=ready.a, b=ready.b, state=many.S)
    for found_y, found_S in ((found.y, found.S), (finish(many, ready.k, out), after)):
        assert mx.allclose(found_y[:-1], mx.repeat(y[:1], n - 1, axis=0), 1e-4, 1e-5)
        assert mx.allclose(found_S[:-1], mx.repeat(S[:1], n - 1, axis=0), 1e-4, 1e-5)
        assert mx.all(found_y[-1] == 0)
    assert mx.array_equal(found.S[-1], x.S[0])
    z = normal(n, 1, 32)
    normed = gated_norm(z, z, None, 1e-6, lengths=lengths)
    assert mx.array_equal(normed[:-1], gated_norm(z, z, None, 1e-6)[:-1]) and mx.all(normed[-1] == 0)
