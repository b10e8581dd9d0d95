"""How many dispatches a mixer costs, counted in the graph MLX exports with its own kernel objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from mlxlin.backend import mx
from mlxlin.metal.mixer import FusedSpec, Projected
from mlxlin.recurrences import mixer, run
from mlxlin.recurrences.samples import sample, sample_mixer
from mlxlin.selftest import MIXERS

from .graphs import dispatches, exported, metal_in_name


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    """Metal in name only: graphs are exported, nothing runs, and MLX makes the kernels itself."""
    with metal_in_name():
        yield


def arrays_of(x: Projected) -> dict[str, mx.array]:
    return {f.name: z for f in fields(x) if isinstance(z := getattr(x, f.name), mx.array)}


def decode_counts(spec: FusedSpec, tokens: int) -> Counter[str]:
    x = replace(sample_mixer(spec, 1, tokens, mx.bfloat16), lengths=None)
    mx.eval(x.qkv)
    given = arrays_of(x)

    def call(*arrays: mx.array) -> list[mx.array]:
        mixed = mixer.advance(spec, replace(x, **dict(zip(given, arrays, strict=True))))
        return [mixed.y, mixed.S]

    return dispatches(exported(call, *given.values()))


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_mixer_decodes_in_one_dispatch_or_two_where_heads_are_few_or_normed_together(name: str, tokens: int) -> None:
    few_or_joint = ("gated linear attention", "gated slot attention", "hgrn2", "lightning", "mamba 2")
    apart = {"gated_norm": 1} if name in few_or_joint else {}
    assert decode_counts(MIXERS[name], tokens) == {"decode": 1, **apart}


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "gated slot attention"])
def test_a_mixer_prefills_in_four_dispatches_at_most(name: str) -> None:
    spec = MIXERS[name]
    prep = "prep_channel" if spec.decay == "channel" or spec.reader else "prep_head"
    around = {} if name == "low rank" else {"prefill": 1, "gated_norm": 1}  # it has nothing around its recurrence
    recurrence = {prep: 1, "chunk": 1} if spec.normalize is None else {"scan": 1}
    assert decode_counts(spec, 64) == {**recurrence, **around}


def test_gated_slot_attention_prefills_by_the_kernels_of_its_two_recurrences() -> None:
    around = {"prefill": 1, "Softmax": 1, "gated_norm": 1}
    assert decode_counts(MIXERS["gated slot attention"], 64) == {"scan": 1, "prep_channel": 1, "chunk": 1, **around}


@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.parametrize("rule", ["decay", "kda", "gated_delta", "dplr"])
def test_a_recurrence_costs_its_kernels_and_nothing_else(rule: str, tokens: int) -> None:
    decay = "channel" if rule == "kda" else "head"
    x = sample(rule, decay, 64, 64, 2, tokens, mx.bfloat16)
    names = [n for n in ("q", "k", "v", "g", "beta", "a", "b", "lengths") if getattr(x, n) is not None]

    def call(*arrays: mx.array) -> list[mx.array]:
        given = dict(zip([*names, "state"], arrays, strict=True))
        return list(run(rule, **given))

    found = dispatches(exported(call, *(getattr(x, n) for n in names), x.S))
    prep = "prep_channel" if rule in ("kda", "dplr") else "prep_head"
    assert found == ({"scan": 1} if tokens == 5 else {prep: 1, "chunk": 1})
