"""Launcher of `time_mix`: RWKV-7 between its projections for up to sixteen tokens, in one dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mlxlin.backend import mx

from .decode import BUCKETS, SIMD_GROUPS
from .kernels import Outputs, lanes_per_row, launch, literal, view
from .mixer import LONGEST, Record

SLOWEST = -0.6065306597126334  # log of the smallest decay factor, -exp(-1/2)


@dataclass(frozen=True, eq=False)
class TimeMix:
    """What RWKV-7's time mixing makes of its projections, D = H K channels wide (arXiv:2503.14456).

    Attributes:
        r, k, v, gate: [B, T, D].
        decay, rate: [B, T, D], before their sigmoids.
        S: float32 [B, H, K, K].
        k_k, k_a, gain, bias: [D].
        r_k: [H, K].
        eps: of the norm over each head. key_eps: added to the sum of squares of the keys taken out of the state.
        lengths: real tokens of each row [B], None where all are.
    """

    r: mx.array
    k: mx.array
    v: mx.array
    gate: mx.array
    decay: mx.array
    rate: mx.array
    S: mx.array
    k_k: mx.array
    k_a: mx.array
    gain: mx.array
    bias: mx.array
    r_k: mx.array
    eps: float
    key_eps: float
    lengths: mx.array | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, T, H, K."""
        (B, T, _), (_, H, K, _) = self.r.shape, self.S.shape
        return B, T, H, K


def _record(K: int) -> Record:
    """q | k | v | decays | a | b, K floats each."""
    return Record(K, 2 * K, 3 * K, 4 * K, 5 * K, 6 * K, 6 * K, 6 * K)


def longest(K: int) -> int:
    """The most tokens that `time_mix` takes at once."""
    return min(LONGEST, Record.FLOATS // _record(K).size)


def time_mix(x: TimeMix) -> tuple[mx.array, mx.array]:
    """y [B, T, D] in the dtype of r, zero past the last real token of a row, and S."""
    B, T, H, K = x.sizes
    per_token = {name: getattr(x, name)[:, :, None] for name in ("r", "k", "v", "gate", "decay", "rate")}
    wide = {name: getattr(x, name)[None, None, None] for name in ("k_k", "k_a", "gain", "bias")}
    per_token["decay"] = x.decay.reshape(B, T, H, K)
    arrays = {**per_token, **wide, "r_k": x.r_k[None, None], "S": x.S, "lengths": x.lengths}
    outputs: Outputs = {"y": ((B, T, H * K), x.r.dtype), "S_out": (x.S.shape, mx.float32)}
    tokens = min(next(n for n in BUCKETS if n >= T), longest(K))
    body = _body(H, K, x.eps, x.key_eps, tokens, x.lengths is not None)
    y, S = launch(
        "time_mix",
        ("mixer", "decode", "rwkv7"),
        body,
        {**arrays, "T": T},
        outputs,
        (32 * SIMD_GROUPS, H, B),
        (32 * SIMD_GROUPS, 1, 1),
    )
    return y, S


@cache
def _body(H: int, K: int, eps: float, key_eps: float, tokens: int, ragged: bool) -> str:
    at, lanes = _record(K), lanes_per_row(K)

    def seen(*names: str) -> str:
        return ", ".join(view(name, name != "lengths" or ragged) for name in names)

    def channels(name: str) -> str:
        return f"channels<0>({seen(name)}, {none}, {none}, {none})"

    none = "view(Absent())"
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    offsets = f"{at.keys}, {at.values}, {at.decays}, {at.a}, {at.b}, {at.betas}, -1"
    lines = [
        f"threadgroup float x[{tokens * at.size}];",
        f"const Place p = place_of(threadgroup_position_in_grid, {K}, {H}, {H}, 1, {seen('lengths')}, T, "
        f"simdgroup_index_in_threadgroup, {SIMD_GROUPS}, thread_index_in_simdgroup);",
        f"stage_vectors<{K}, {at.size}, IDENTITY, false>(x, {channels('r')}, p.hv * {K}, 1.0f, p);",
        f"stage_values<{K}, {at.size}, IDENTITY>(x + {at.values}, {channels('v')}, p.hv * {K}, p);",
        f"stage_removal<{K}, {at.size}>(x + {at.keys}, x + {at.a}, x + {at.b}, {seen('k', 'rate', 'k_k', 'k_a')}, "
        f"{literal(key_eps)}, p);",
        f"stage_slow_decays<{K}, {at.size}>(x + {at.decays}, {seen('decay')}, {literal(SLOWEST)}, p);",
        barrier,
        f"recur<{K}, {K}, {lanes}, {at.size}, CHANNEL_DECAY, LOW_RANK, 1, {offsets}>(x, {seen('S')}, {none}, "
        f"normaliser({none}, Absent(), 0.0f), S_out, Absent(), Absent(), T, {H}, {K}, p);",
        barrier,
        f"finish_time_mix<{K}, {K}, {at.size}, {at.keys}, {at.values}>(x, {seen('v', 'r_k', 'gain', 'bias', 'gate')}, "
        f"{literal(eps)}, y, T, {H}, p);",
    ]
    return "\n".join(lines)
