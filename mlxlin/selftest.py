"""Every kernel against the definition, on the machine it will run on.

On Metal each kernel runs at several head sizes, dtypes and lengths. Elsewhere the plain operations that
`recurrences.run` uses are checked in the same way, and the report says that there was no Metal to check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlxlin.backend import mx, on_metal
from mlxlin.metal.decode import decode, replay, replay_keys
from mlxlin.metal.layers import add_norm, gated_norm, router_topk
from mlxlin.metal.mixer import FusedSpec, Mixed
from mlxlin.metal.recurrence import columns_for, rows_for
from mlxlin.metal.rwkv7 import time_mix
from mlxlin.recurrences import RULES, kernels, run, rwkv7
from mlxlin.recurrences.mixer import by_kernels, float64, in_float32, mix
from mlxlin.recurrences.probe import TOLERANCE, relative_error
from mlxlin.recurrences.reference import scan_float64
from mlxlin.recurrences.rules import DecayKind, Inputs
from mlxlin.recurrences.samples import sample, sample_mixer

Float64 = npt.NDArray[np.float64]
SIZES = ((64, 64, 1, mx.float32), (128, 128, 2, mx.bfloat16), (96, 192, 3, mx.float16), (256, 256, 1, mx.bfloat16))
_MANY = 1 << 20  # heads
GATED_DELTA_NET = FusedSpec(
    16,
    32,
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
    scale=128**-0.5,
    decay_kind="softplus",
    beta="sigmoid",
    norm=True,
    eps=1e-6,
    gate="silu",
)
MIXERS = {
    "gated delta net": GATED_DELTA_NET,
    "comba": replace(GATED_DELTA_NET, reader=True, gate="sigmoid"),
    "kimi delta attention": replace(GATED_DELTA_NET, heads=32, decay="channel", eps=1e-5, gate="sigmoid"),
    "gated linear attention": FusedSpec(
        4,
        4,
        256,
        512,
        "add",
        "channel",
        scale=256**-0.5,
        decay_kind="logsigmoid",
        decay_constant=16.0,
        norm=True,
        eps=1e-5,
        gate="silu",
    ),
    "mamba 2": FusedSpec(
        8,
        64,
        128,
        64,
        "add",
        "head",
        taps=4,
        q_activation="silu",
        k_activation="silu",
        v_activation="silu",
        decay_kind="softplus",
        scales_values=True,
        skip=True,
        norm=True,
        joint_groups=8,
        eps=1e-5,
        gate="silu",
        gate_first=True,
    ),
    "retention": FusedSpec(16, 16, 64, 128, "add", "head", rotary=64, scale=64**-0.5, norm=True, eps=1e-5, gate="silu"),
    "lightning": FusedSpec(
        32,
        32,
        128,
        128,
        "add",
        "head",
        q_norm="rms",
        k_norm="rms",
        qk_eps=1e-6,
        rotary=64,
        scale=128**-0.5,
        norm=True,
        joint_groups=4,
        eps=1e-6,
        gate="sigmoid",
    ),
    "hgrn2": FusedSpec(
        16,
        16,
        128,
        128,
        "add",
        "channel",
        taps=4,
        q_activation="silu",
        scale=128**-0.5,
        decay_kind="forget",
        norm=True,
        joint_groups=1,
        eps=1e-5,
    ),
    "linear attention, hedgehog": FusedSpec(
        16, 16, 128, 64, "add", "none", apart=True, features="hedgehog", normalize=1e-10, norm=True, eps=1e-5
    ),
    "linear attention, dpfp": FusedSpec(
        16, 16, 256, 64, "add", "none", features="dpfp", k_norm="simplex", norm=True, eps=1e-5
    ),
    "rwkv 6": FusedSpec(
        32,
        32,
        64,
        128,
        "add",
        "channel",
        apart=True,
        decay_kind="exponential",
        bonus=True,
        norm=True,
        centered=True,
        eps=1e-5,
        gate="silu",
    ),
    "gated slot attention": FusedSpec(
        4,
        4,
        256,
        256,
        "add",
        "channel",
        v_activation="silu",
        features="silu",
        decay_kind="logsigmoid",
        decay_constant=8.0,
        slots=64,
        norm=True,
        joint_groups=1,
        eps=1e-5,
        gate="sigmoid",
        gate_first=True,
        self_gated=True,
    ),
    "low rank": FusedSpec(32, 32, 64, 64, "low_rank", "channel", apart=True),
}


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        kernel: what ran.
        shape: of what, for people.
        error: relative RMS of the worst result against the definition.
        seconds: of a second run, compiled before.
        ok: within the tolerance of the dtype.
        complaint: what went wrong, empty where nothing did.
    """

    kernel: str
    shape: str
    error: float
    seconds: float
    ok: bool
    complaint: str = ""


@dataclass(frozen=True)
class Check:
    """Something to run, and what it should give."""

    kernel: str
    shape: str
    found: Callable[[], list[mx.array]]
    expected: Callable[[], list[Float64]]


def note() -> str:
    """What a person should know about the rows."""
    return "" if on_metal() else "There is no Metal here: the plain operations were checked, not the kernels."


def rows() -> Iterator[Row]:
    """The checks of this machine, one after the other, as they finish."""
    return map(_row, _checks())


def _checks() -> Iterator[Check]:
    if on_metal():
        yield from _recurrence_checks({"scan": (kernels.scan, 7), "chunk": (kernels.chunk, 45)})
        yield from _recurrence_checks({"scan, many heads": (_wide_scan, 7), "chunk, many heads": (_wide_chunk, 45)})
        yield from _mixer_checks()
        for K, tokens, dtype in ((64, 1, mx.bfloat16), (64, 4, mx.float32), (128, 2, mx.float16)):
            yield _time_mix_check("time_mix", K, tokens, dtype)
        for dtype in (mx.float32, mx.bfloat16):
            yield _time_mix_check("time_mix_prefill", 64, 40, dtype)
        yield _time_mix_replay_check()
        yield from _layer_checks()
    else:
        yield from _recurrence_checks({"step": (_operations, 1), "chunkwise": (_operations, 150)})


def _row(check: Check) -> Row:
    try:
        found = check.found()
        mx.eval(found)
        start = time.perf_counter()
        mx.eval(check.found())
        seconds = time.perf_counter() - start
    except Exception as error:  # whatever MLX and the compiler raise belongs into the report
        return Row(check.kernel, check.shape, float("nan"), 0.0, False, f"{type(error).__name__}: {error}")
    errors = [relative_error(z, wanted) for z, wanted in zip(found, check.expected(), strict=True)]
    ok = all(error < TOLERANCE.get(z.dtype, 1e-9) for error, z in zip(errors, found, strict=True))
    return Row(check.kernel, check.shape, max(errors), seconds, ok, "" if ok else "wrong numbers")


def _operations(x: Inputs) -> kernels.Result:
    given = {name: z for name in ("g", "beta", "a", "b", "lengths") if (z := getattr(x, name)) is not None}
    y, S = run(x.rule.name, x.q, x.k, x.v, **given, state=x.S)
    assert isinstance(S, mx.array)
    return y, S, None


def _wide_scan(x: Inputs) -> kernels.Result:
    """As wide as it runs for many heads."""
    return kernels.scan(x, rows_for(x.q.shape[3], x.v.shape[3], _MANY))


def _wide_chunk(x: Inputs) -> kernels.Result:
    return kernels.chunk(x, columns_for(x.q.shape[3], x.v.shape[3], _MANY))


def _recurrence_checks(paths: Mapping[str, tuple[Callable[[Inputs], kernels.Result], int]]) -> Iterator[Check]:
    for name, (kernel, tokens) in paths.items():
        for rule in RULES.values():
            for decay in rule.decays:
                if kernel in (kernels.chunk, _wide_chunk) and decay not in kernels.CHUNKED:
                    continue
                for size in SIZES if rule.name == "gated_delta" else SIZES[:2]:
                    yield _recurrence_check(name, kernel, tokens, rule.name, decay, size)


def _recurrence_check(
    name: str,
    kernel: Callable[[Inputs], kernels.Result],
    tokens: int,
    rule: str,
    decay: DecayKind,
    size: tuple[int, int, int, mx.Dtype],
) -> Check:
    K, V, groups, dtype = size
    x = sample(rule, decay, K, V, groups, tokens, dtype, substeps=2 if RULES[rule].substeps else 1)
    shape = f"{rule}, {decay} decay, T {tokens}, K {K}, V {V}, {groups} per key head, {_text(dtype)}"
    return Check(name, shape, lambda: list(kernel(x)[:2]), lambda: list(scan_float64(x)[:2]))


def _mixer_checks() -> Iterator[Check]:
    for name, spec in MIXERS.items():
        for dtype in (mx.float32, mx.bfloat16):
            for tokens in (1, 4):
                yield _mixer_check("decode", name, spec, tokens, dtype)
            yield _mixer_check("prefill", name, spec, 40, dtype)
        yield _decode_replay_check(name, spec)


def _mixer_check(kernel: str, name: str, spec: FusedSpec, tokens: int, dtype: mx.Dtype) -> Check:
    x = sample_mixer(spec, 2, tokens, dtype)

    def found() -> list[mx.array]:
        y, *states = _arrays(by_kernels(spec, x))
        # prefill rounds the inputs of the recurrence, so its state is as good as they are
        return [y, *(states if kernel == "decode" else (z.astype(dtype) for z in states))]

    def expected() -> list[Float64]:
        return [float64(z) for z in _arrays(mix(spec, in_float32(x)))]

    return Check(kernel, f"{name}, T {tokens}, {_text(dtype)}", found, expected)


def _arrays(mixed: Mixed) -> list[mx.array]:
    return [z for z in (mixed.y, mixed.S, mixed.S_keys) if z is not None]


def _decode_replay_check(name: str, spec: FusedSpec) -> Check:
    x = sample_mixer(spec, 1, 4, mx.float32)
    return _replay_check(name, spec, x.S, x.S_keys, lambda n: decode(spec, replace(x, lengths=n), tape=n is None))


def _time_mix_replay_check() -> Check:
    x = rwkv7.sample(16, 64, 4, mx.bfloat16)
    return _replay_check("RWKV-7", x.spec, x.S, None, lambda n: time_mix(replace(x, lengths=n), tape=n is None))


def _replay_check(
    name: str, spec: FusedSpec, S: mx.array, S_keys: mx.array | None, run: Callable[[mx.array | None], Mixed]
) -> Check:
    """The replayed states have the bits of the decoded ones: any difference is an error. `run` takes the lengths."""

    def found() -> list[mx.array]:
        three = mx.full((S.shape[0],), 3)
        tape, decoded = run(None).tape, run(three)
        assert tape is not None
        pairs = [(replay(spec, S, tape, three), decoded.S)]
        if S_keys is not None and decoded.S_keys is not None:
            pairs.append((replay_keys(spec, S_keys, tape, three), decoded.S_keys))
        return [(a != b).astype(mx.int32) for a, b in pairs]

    zeros = [np.zeros(z.shape) for z in (S, S_keys) if z is not None]
    return Check("replay", f"{name}, 3 of 4 tokens", found, lambda: zeros)


def _time_mix_check(kernel: str, K: int, tokens: int, dtype: mx.Dtype) -> Check:
    x = rwkv7.sample(16, K, tokens, dtype)
    shape = f"RWKV-7, T {tokens}, 16 heads of {K}, {_text(dtype)}"

    def found() -> list[mx.array]:
        mixed = rwkv7.by_kernels(x)
        return [mixed.y, mixed.S if kernel == "time_mix" else mixed.S.astype(dtype)]  # as in a mixer

    return Check(kernel, shape, found, lambda: [float64(z) for z in rwkv7.mix(rwkv7.in_float32(x))])


def _layer_checks() -> Iterator[Check]:
    rng = np.random.default_rng(0)
    x, gate, weights = (
        mx.array(rng.normal(size=(2, 3, 2560)).astype(np.float32)).astype(mx.bfloat16) for _ in range(3)
    )
    logits, weight = mx.array(rng.normal(size=(2, 3, 256)).astype(np.float32)), weights[0, 0]

    def normed(z: mx.array) -> mx.array:
        return mx.fast.rms_norm(z.astype(mx.float32), weight.astype(mx.float32), 1e-6)

    def gated() -> list[Float64]:
        z = gate.astype(mx.float32)
        return [float64(normed(x) * z * mx.sigmoid(z))]

    def routed() -> list[Float64]:
        scores = mx.softmax(logits, axis=-1)
        best = mx.argsort(-scores, axis=-1)[..., :8]
        top = mx.take_along_axis(scores, best, axis=-1)
        return [float64(best), float64(top / top.sum(axis=-1, keepdims=True))]

    width = "width 2560, bfloat16"
    yield Check("add_norm", width, lambda: [add_norm(x, gate, weight, 1e-6)[1]], lambda: [float64(normed(x + gate))])
    yield Check("gated_norm", width, lambda: [gated_norm(x, gate, weight, 1e-6, activation="silu")], gated)
    yield Check("router_topk", "8 of 256", lambda: list(router_topk(logits, 8)), routed)


def _text(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]
