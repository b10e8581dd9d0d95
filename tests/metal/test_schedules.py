"""Results that depend on nothing but the inputs: not on the order of threads, the language version, or alignment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import decode
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import chunk, scan

from .cases import Case, arguments
from .conftest import emulated
from .test_decode import Call
from .test_layers import normal

Arrays = list[mx.array]


def run_scan() -> Arrays:
    cases = [Case(rule, T=3, B=2, lengths=(3, 2), gates="mixed") for rule in ("kda", "gated_values")]
    return [z for case in cases for z in scan(arguments(case.inputs())) if z is not None]


def run_chunk_head() -> Arrays:
    case = Case("gated_delta", T=17, H=2, V=64, gates="mixed", keys="correlated", dtype=mx.bfloat16)
    return list(chunk(arguments(case.inputs())))


def run_chunk_channel() -> Arrays:
    return list(chunk(arguments(Case("dplr", T=18, gates="mixed", groups=1).inputs())))


def run_decode() -> Arrays:
    mixed = decode(*Call("gated_delta_net-split", T=3, B=2, lengths=(3, 1)).projected(), tape=True)
    assert mixed.memory is not None and mixed.tape is not None
    return [mixed.y, mixed.S, mixed.memory, mixed.tape.k, mixed.tape.u]


def run_decode_whole() -> Arrays:
    return [decode(*Call("gated_delta_net", T=2).projected()).y]


def run_decode_kinds() -> Arrays:
    """With a step and a skip, rotated with grouped heads, normalised, with a reader, a bonus, slots, and maps."""
    names = ("mamba2", "retention-grouped", "normalised", "comba", "rwkv6", "slots-conv")
    mixed = [decode(*Call(name, T=2).projected()) for name in (*names, "forgetting-convolved", "hedgehog", "rms")]
    return [z for one in mixed for z in (one.y, one.S, one.Z, one.S_keys, one.memory) if z is not None]


def run_prefill() -> Arrays:
    names = ("kda-bounded", "mamba2", "retention-grouped", "forgetting", "comba", "rwkv6", "slots")
    calls = [Call(name, T=3) for name in names]
    found = [z for call in calls for z in vars(prefill(*call.projected())).values() if z is not None]
    return [array for z in found for array in (z if isinstance(z, tuple) else (z,))]


def run_layers() -> Arrays:
    x = normal(1, 2, 1000)
    layer_normed = add_norm(x, x, x[0, 0], 1e-6, centered=True, bias=x[0, 1])
    return [
        *layer_normed,
        *add_norm(x, x, x[0, 0], 1e-6),
        gated_norm(x, x, x[0, 0], 1e-6),
        gated_norm(x, x, None, None, activation="silu", groups=5, skip=x[0, 0, :10, None], v=x.reshape(1, 2, 10, 100)),
        *router_topk(normal(1, 9, 64), 4),
    ]


RUNS = [
    run_scan,
    run_chunk_head,
    run_chunk_channel,
    run_decode,
    run_decode_whole,
    run_decode_kinds,
    run_prefill,
    run_layers,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_bits_do_not_depend_on_the_schedule(run: Callable[[], Arrays]) -> None:
    expected = run()
    for order in (3, 5, 6):
        with emulated(order=order):
            assert all(mx.array_equal(a, b) for a, b in zip(run(), expected, strict=True)), order


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
