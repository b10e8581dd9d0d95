"""How much work the kernels do: counted by the emulator, held to budgets.

Counts are of one call and per whole launch. A budget is what the kernel needs by its own arithmetic where that can be
written down (matrix products, barriers, threadgroup memory), else the count it reached, rounded up by a few percent.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxlin.backend import mx
from mlxlin.metal.decode import decode, replay
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.mixer import FusedSpec
from mlxlin.metal.prefill import prefill
from mlxlin.metal.recurrence import chunk, scan
from mlxlin.metal.rwkv7 import time_mix
from mlxlin.recurrences.rwkv7 import by_kernels, sample
from mlxlin.recurrences.samples import sample_mixer
from mlxlin.selftest import MIXERS

from .cases import Case, arguments
from .measure import Budget, launches_of
from .test_layers import normal

T, K, V, HV = 64, 64, 128, 2
CHUNKS = T // 16


def prefill_case(rule: str) -> Case:
    return Case(rule, T=T, K=K, V=V, groups=HV, dtype=mx.bfloat16)


def state_products(reads: int, triangles: int, columns: int) -> int:
    """Products of all SIMD-groups: per chunk two tiles of tokens for every use of the state, three per triangle."""
    per_chunk = columns * (2 * (K // 8) * reads + 3 * triangles)
    return per_chunk * CHUNKS * HV * V // (8 * columns)


STATE = HV * V * K * 4
INPUTS = T * (2 * K + HV * V) * 2  # q, k, v
OUTPUT = T * HV * V * 2


@pytest.mark.parametrize(("columns", "loads", "issued"), [(1, 1.2, 825_000), (2, 0.64, 510_000), (4, 0.36, 355_000)])
def test_chunk_with_one_decay_per_head(columns: int, loads: float, issued: int) -> None:
    x = arguments(prefill_case("gated_delta").inputs())
    prep, state = launches_of(lambda: chunk(x, columns=columns))
    triangles = 2 * HV * CHUNKS * 192 * 4  # X and P
    small = 10_000  # gates, strides
    Budget(
        unique=T * 2 * K * 2 + triangles + small,
        issued=33_000,
        flops=82_000,
        simd=1_720,
        products=2 * 3 * (K // 8) * CHUNKS,
        loads=2.1,
        threadgroup=4 * 2 * 16 * 36 * 4,
    ).check(prep)
    Budget(
        unique=2 * STATE + INPUTS + OUTPUT + triangles + small,
        issued=issued,
        flops=250_000,  # one for each product by a decay would be 200,000; two keep slow decays exact
        simd=12_000,
        products=state_products(reads=3, triangles=2, columns=columns),
        loads=loads,
        barriers=2 * CHUNKS * HV * V // (8 * columns * 4),
        threadgroup=16 * (K + 4) * 4,
    ).check(state)


@pytest.mark.parametrize(
    ("rule", "reads", "triangles", "issued"),
    [("gated", 2, 1, 850_000), ("kda", 3, 2, 1_160_000), ("dplr", 4, 4, 1_530_000)],
)
def test_chunk_with_one_decay_per_channel(rule: str, reads: int, triangles: int, issued: int) -> None:
    x = arguments(prefill_case(rule).inputs())
    prep, state = launches_of(lambda: chunk(x, columns=2))
    products = {"gated": 1, "kda": 2, "dplr": 4}[rule]  # of rows and columns, each over four levels and the diagonal
    levels = 4 * (1 + 3 * 2) * products + 4 * 2 * (2 if rule == "dplr" else 1)
    decayed = HV * T * K * 4 * reads
    small = 20_000
    stored = triangles * HV * CHUNKS * 192 * 4 + HV * CHUNKS * K * 4
    inputs = T * K * (4 * HV + 2 * (4 if rule == "dplr" else 2))
    Budget(
        unique=inputs + decayed + stored + small,
        issued=inputs * HV + decayed + stored + small,
        flops=400_000,
        simd=8_000,
        products=levels * (K // 32) * CHUNKS * HV,
        loads=2.7,
        threadgroup=2 * 2 * 16 * 36 * 4,
    ).check(prep)
    Budget(
        unique=2 * STATE + decayed + stored + T * HV * V * 2 + OUTPUT + small,
        issued=issued,
        flops=150_000,
        simd=16_000,
        products=state_products(reads, triangles, columns=2),
        loads=0.68,
    ).check(state)


@pytest.mark.parametrize(("rule", "reads"), [("gated_delta", 2), ("gated_values", 1)])
def test_scan(rule: str, reads: int) -> None:
    x = arguments(Case(rule, T=8, K=128, V=128, groups=2, dtype=mx.bfloat16).inputs())
    (launch,) = launches_of(lambda: scan(x))
    state, rows = 2 * 128 * 128 * 4, 2 * 128 // 8
    gates = 8 * 2 * 128 * 4 if rule == "gated_values" else 0
    Budget(
        unique=2 * state + 8 * (2 * 128 + 2 * 2 * 128) * 2 + gates + 1_000,
        issued=2 * state + 8 * rows * (8 * 2 * 128 * 2 + 32 * 4 * 3),
        flops=int(1.05 * 8 * 2 * (2 + reads) * 2 * 128 * 128),  # decay, read, write and query: an fma each per element
        simd=8 * rows * 2 * reads,  # sums of two shuffles per token
    ).check(launch)


@pytest.mark.parametrize("reader", [False, True])
def test_decode_reads_and_writes_the_state_once(reader: bool) -> None:
    spec = FusedSpec(
        8,
        16,
        128,
        128,
        "delta",
        "head",
        taps=4,
        q_activation="silu",
        k_activation="silu",
        v_activation="silu",
        q_norm="l2",
        k_norm="l2",
        decay_kind="softplus",
        beta="sigmoid",
        norm=True,
        eps=1e-6,
        gate="silu",
        reader=reader,
    )
    x = sample_mixer(spec, 1, 1, mx.bfloat16)
    (launch,) = launches_of(lambda: decode(spec, x))
    state = 16 * 128 * 128 * 4
    channels = spec.width * 2 * (1 + 4 + 3 + 3)  # projections, taps, memory in and out
    Budget(
        unique=2 * state + channels + 3 * 16 * 128 * 2 + 2_000,
        issued=2 * state + 3 * channels,
        flops=int(1.08 * 8 * 16 * 128 * 128),
        simd=16 * (2 + 128 // 8 * 5 + 2),
        barriers=2 * 16,
        threadgroup=4 * ((3 + reader) * 128 + 2),
    ).check(launch)


def test_decode_of_mamba2_with_one_key_head() -> None:
    """Sixteen value heads share B and C: each makes them ready for itself, the state is still read and written once."""
    spec = replace(MIXERS["mamba 2"], heads=1, value_heads=16)
    x = sample_mixer(spec, 1, 1, mx.bfloat16)
    (launch,) = launches_of(lambda: decode(spec, x))
    state, shared = 16 * 64 * 128 * 4, 2 * 128 * 2 * (1 + 4 + 3)
    channels = spec.width * 2 * (1 + 4 + 3 + 3)
    Budget(
        unique=2 * state + channels + 16 * 64 * 2 + 2_000,
        issued=2 * state + 3 * channels + 16 * shared + 20_000,  # v, dt, y
        flops=int(1.1 * 6 * 16 * 64 * 128),  # decay, write and query
        simd=16 * 8 * 3,  # v to its row, and the query's two shuffles
        barriers=2 * 16,
        threadgroup=4 * (2 * 128 + 64 + 2),
    ).check(launch)


@pytest.mark.parametrize(
    ("name", "operations", "simd", "issued"),
    [
        ("hgrn2", 6, 16 * 48, 335_000),  # decay, write and query; the decay is convolved for the gate and for the key
        ("linear attention, hedgehog", 8, 16 * 45, 600_000),  # the sum of the keys too, which every row reads
        ("linear attention, dpfp", 4, 16 * 66, 90_000),
    ],
)
def test_decode_with_features(name: str, operations: int, simd: int, issued: int) -> None:
    """Features cost no bytes and little arithmetic: each head makes them once."""
    spec = MIXERS[name]
    x = sample_mixer(spec, 1, 1, mx.bfloat16)
    (launch,) = launches_of(lambda: decode(spec, x))
    H, K, V = spec.heads, spec.key_dim, spec.value_dim
    state, sums = H * K * V * 4, 2 * H * K * 4 if spec.normalize else 0
    channels = spec.width * 2 * (11 if spec.taps else 1)  # projections, taps, memory in and out
    Budget(
        unique=2 * state + sums + channels + H * V * 2 + (H * K * 4 if spec.decay != "none" else 0) + 3_000,
        issued=2 * state + issued,
        flops=int(1.1 * operations * H * K * V),
        simd=simd,
        barriers=2 * H,
        threadgroup=4 * (2 * K + V + (K if spec.decay == "channel" else 0)),
    ).check(launch)


def test_prefill_of_mamba2() -> None:
    """A projected channel is read for four tokens; values are written with their step and without."""
    spec, tokens = MIXERS["mamba 2"], 8
    x = replace(sample_mixer(spec, 1, tokens, mx.bfloat16), lengths=None)
    (launch,) = launches_of(lambda: prefill(spec, x))
    written = tokens * (spec.width + 64 * 64) * 2 + 3 * spec.width * 2 + tokens * 64 * 4
    Budget(
        unique=(tokens + 4 + 3) * spec.width * 2 + tokens * 64 * 2 + written + 2_000,
        issued=(tokens * (4 + 4) + 3) * spec.width * 2
        + written
        + tokens * (8 + 8 + 64) * 32 * 20,  # steps by all lanes
        flops=14 * tokens * spec.width,
        simd=0,
    ).check(launch)


def test_gated_norm_with_what_bypasses_the_recurrence() -> None:
    tokens, C, groups = 8, 64 * 64, 8
    y, v = mx.zeros((1, tokens, C), dtype=mx.bfloat16), mx.zeros((1, tokens, 64, 64), dtype=mx.bfloat16)
    (launch,) = launches_of(
        lambda: gated_norm(
            y, y, y[0, 0], 1e-5, activation="silu", groups=groups, gate_first=True, skip=mx.zeros((64, 1)), v=v
        )
    )
    Budget(
        unique=4 * tokens * C * 2 + C * 2 + 1_000,
        issued=tokens * C * 2 * (2 * (3 + 2) + 2) + 20_000,
        flops=17 * tokens * C,
        simd=tokens * groups * 2 * 2,
        barriers=tokens * groups,
        threadgroup=128,
    ).check(launch)


def test_decode_of_rwkv6_reads_the_state_once() -> None:
    """Reading before the write costs no more than reading after it."""
    spec = replace(MIXERS["rwkv 6"], heads=16, value_heads=16)
    x = sample_mixer(spec, 1, 1, mx.bfloat16)
    (launch,) = launches_of(lambda: decode(spec, x))
    state, vectors = 16 * 128 * 64 * 4, 16 * 2 * (3 * 64 + 3 * 128)  # r, k, decay; v, gate, y
    parameters = 16 * 2 * (64 + 2 * 128)  # bonus, gain, bias
    Budget(
        unique=2 * state + vectors + parameters + 2_000,
        issued=2 * state + vectors + parameters + 16 * 16 * 256,  # and T, by every thread
        flops=int(1.1 * 6 * 16 * 128 * 64),  # decay, write and query
        simd=16 * (1 + 2 * 8 * 3 + 2),  # the bonus; v to its row and the query's two shuffles, twice; mean and norm
        barriers=2 * 16,
        threadgroup=4 * (3 * 64 + 128 + 1),
    ).check(launch)


def test_decode_of_gated_slot_attention_reads_both_states_once_for_each_part_of_a_head() -> None:
    spec = MIXERS["gated slot attention"]
    x = sample_mixer(spec, 1, 1, mx.bfloat16)
    (launch,) = launches_of(lambda: decode(spec, x))
    heads, parts, state = 4, 4, 4 * 256 * 64 * 4
    vectors = heads * 2 * (4 * 256 + 64)  # q, k, v, y; forget
    Budget(
        unique=2 * 2 * state + vectors + 2_000,
        # keys by every part and back by one, values; and T, by every thread
        issued=(parts + 3) * state + parts * vectors + 20 * heads * parts * 256,
        flops=int(1.1 * 6 * (parts + 1) * heads * 256 * 64),
        simd=heads * parts * (16 * 4 + 2 + 8 * 3),  # rows of 8 and of 4 lanes, and a softmax between
        barriers=4 * heads * parts,
        threadgroup=4 * (2 * 256 + 3 * 64 + 64),
    ).check(launch)


def test_time_mix() -> None:
    x = sample(4, 64, 1, mx.bfloat16)
    (launch,) = launches_of(lambda: time_mix(x))
    heads, state = 2 * 4, 2 * 4 * 64 * 64 * 4
    vectors = 7 * heads * 64 * 2
    Budget(
        unique=2 * state + vectors + 5 * 4 * 64 * 2 + 1_000,
        issued=2 * state + 5 * vectors + heads * 5 * 64 * 2,
        flops=int(1.1 * 10 * heads * 64 * 64),  # decay, two answers, two writes
        simd=heads * (8 * 5 + 4),
        barriers=2 * heads,
        threadgroup=4 * 6 * 64,
    ).check(launch)


def test_a_tape_of_time_mix_costs_what_it_holds() -> None:
    x = sample(4, 64, 4, mx.bfloat16)
    plain, taping = launches_of(lambda: (time_mix(x), time_mix(x, tape=True)))
    tape = 5 * 2 * 4 * 4 * 64 * 4  # g, k, u, z, b: rows, tokens, heads, channels
    Budget(
        unique=plain.report.unique_bytes + tape,
        issued=plain.issued_bytes + tape + 4 * 4 * plain.report.threads,  # every thread reads T
        flops=plain.report.flops,
        simd=plain.report.simd_ops,
        barriers=plain.report.barriers,
        threadgroup=plain.report.threadgroup_bytes,
    ).check(taping)


def test_what_surrounds_the_recurrence_of_a_prompt_of_rwkv7() -> None:
    """Every vector comes and goes once: no product of two of them is stored."""
    x = sample(4, 64, 20, mx.bfloat16)
    prepared, finished = (launch for launch in launches_of(lambda: by_kernels(x)) if launch.name != "scan")
    vectors, numbers = 2 * 20 * 4, 2 * 20 * 4 * 64
    Budget(
        unique=numbers * 2 * (3 + 3) + numbers * 4 + 2_000,  # k, rate, decay; k, a, b; g
        issued=numbers * (2 * (7 + 3) + 4) + 3 * 4 * prepared.report.threads + 1_000,  # every thread reads T
        flops=20 * numbers,
        simd=vectors,
    ).check(prepared)
    Budget(
        unique=numbers * 2 * (5 + 1) + 3_000,  # what was read, r, k, v, gate; y
        issued=numbers * 2 * (4 + 7 + 1) + 3 * 4 * finished.report.threads + 1_000,
        flops=18 * numbers,
        simd=3 * vectors,
    ).check(finished)


@pytest.mark.parametrize(("centered", "passes"), [(False, 1), (True, 2)])
def test_add_norm(centered: bool, passes: int) -> None:
    rows, width = 2, 2560
    x = mx.random.normal((1, rows, width), key=mx.random.key(0)).astype(mx.bfloat16)
    (launch,) = launches_of(lambda: add_norm(x, x, x[0, 0], 1e-6, centered=centered))
    Budget(
        unique=2 * rows * width * 2 + 2 * rows * width * 2 + width * 2 + 500,
        issued=rows * width * 2 * (5 + 2 * passes) + 3_000,
        flops=rows * width * (4 + 4 * passes),
        simd=rows * 10 * 2 * passes,
        barriers=rows * (2 * passes - 1),
        threadgroup=128,
    ).check(launch)


@pytest.mark.parametrize(
    ("name", "written", "issued", "flops", "norms"),
    [  # numbers written in two bytes per token, and norms; bytes and operations of all tokens
        ("gated delta net", 128 * (2 * 16 + 32), 1_450_000, 860_000, 2 * 16),
        ("comba", 128 * (4 * 32 + 32), 2_930_000, 2_030_000, 3 * 32),  # by value heads, for beta is
        ("rwkv 6", 64 * 2 * 32 + 128 * 32, 700_000, 51_000, 32),
        ("gated slot attention", 256 * 3 * 4, 152_000, 110_000, 0),
    ],
)
def test_prefill(name: str, written: int, issued: int, flops: int, norms: int) -> None:
    """Every projected number comes from memory once, every argument of the recurrence goes there once."""
    spec, tokens = MIXERS[name], 8
    x = replace(sample_mixer(spec, 1, tokens, mx.bfloat16), lengths=None)
    (launch,) = launches_of(lambda: prefill(spec, x))
    slots, gates = tokens + spec.bonus, spec.value_heads * (spec.state_dim if spec.decay == "channel" else 1)
    decays, betas = gates * (2 if spec.slots else 1), spec.value_heads if spec.write == "delta" else 0
    convolution = 2 * (spec.taps + 2 * (spec.taps - 1)) * spec.width if spec.taps else 0
    Budget(
        unique=slots * (2 * written + 4 * decays + 4 * betas)
        + 2 * tokens * (spec.width + gates + betas)
        + convolution
        + (6_000 if spec.bonus else 3_000),
        issued=issued,
        flops=flops,
        simd=norms * tokens,
    ).check(launch)


def test_replay_reads_the_tape_and_moves_the_state_once() -> None:
    spec, tokens = replace(MIXERS["gated delta net"], heads=8, value_heads=16), 4
    x = replace(sample_mixer(spec, 1, tokens, mx.bfloat16), lengths=None)
    tape = decode(spec, x, tape=True).tape
    assert tape is not None
    (launch,) = launches_of(lambda: replay(spec, x.S, tape, mx.array([tokens])))
    rows, state = 16 * 128, 16 * 128 * 128 * 4
    Budget(
        unique=2 * state + tokens * 4 * (8 * 128 + 16 * 128 + 16) + 500,
        issued=2 * state + tokens * 4 * rows * (128 + 2 * 4) + 16 * launch.report.threads,  # u and g by four lanes
        flops=int(1.05 * tokens * 4 * rows * 128),  # decay and write
        simd=0,
    ).check(launch)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (8, 4)])
def test_router_topk(groups: int, kept: int) -> None:
    logits, correction, tokens, top = normal(1, 4, 256, dtype=mx.bfloat16), normal(256), 4, 8
    (launch,) = launches_of(
        lambda: router_topk(logits, top, score="sigmoid", correction=correction, groups=groups, groups_kept=kept)
    )
    Budget(
        unique=tokens * 256 * 2 + 256 * 4 + tokens * top * (4 + 4) + 200,
        issued=tokens * (256 * (2 + 4) + top * (4 + 4)) + 8 * launch.report.threads,
        flops=tokens * (256 * 4 + 40 * groups),
        simd=tokens * (3 * top + (2 * 2 * groups + 2 * kept if groups > 1 else 0)),
    ).check(launch)
