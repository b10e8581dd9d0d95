"""Launchers of RWKV-7's kernels between its projections: `time_mix`, for up to sixteen tokens in one dispatch, and what
precedes and follows the recurrence of many tokens, in one each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mlxlin.backend import mx

from .decode import BUCKETS, SIMD_GROUPS, gates
from .kernels import Outputs, lanes_per_row, launch, literal, view
from .mixer import LONGEST, FusedSpec, Mixed, Record, Tape
from .prefill import Prepared

SLOWEST = -0.6065306597126334  # log of the smallest decay factor, -exp(-1/2)
_TAPE = ("k", "u", "g", "z", "b")  # in one output: Metal allows 31 buffers
_PARAMETERS = ("k_k", "k_a", "gain", "bias", "r_k")
_INPUTS = ("r", "k", "v", "gate", "decay", "rate", *_PARAMETERS)


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

    def arrays(self, *names: str) -> dict[str, mx.array | None]:
        """Some of its arrays, four-dimensional by head as the kernels see them."""
        B, T, H, K = self.sizes
        found = {name: getattr(self, name) for name in names}
        shapes = {1: (1, 1, H, K), 2: (1, 1, H, K), 3: (B, T, H, K)}
        fixed = ("S", "lengths")
        return {name: z if name in fixed else z.reshape(shapes[z.ndim]) for name, z in found.items()}

    @property
    def spec(self) -> FusedSpec:
        """Its recurrence, as `replay` wants to know it."""
        return _spec(*self.S.shape[1:3])


@cache
def _spec(H: int, K: int) -> FusedSpec:
    return FusedSpec(H, H, K, K, "low_rank", "channel", apart=True, decay_kind="sigmoid", decay_constant=SLOWEST)


@cache
def longest(K: int) -> int:
    """The most tokens that `time_mix` takes at once."""
    return min(LONGEST, Record.FLOATS // Record.of(_spec(1, K), K).size)


def time_mix(x: TimeMix, *, tape: bool = False) -> Mixed:
    """y [B, T, D] in the dtype of r, zero past the last real token of a row, S and, where asked for, the tape."""
    B, T, H, K = x.sizes
    outputs: Outputs = {"y": ((B, T, H * K), x.r.dtype), "S_out": (x.S.shape, mx.float32)}
    if tape:
        outputs["tape"] = ((len(_TAPE), B, T, H, K), mx.float32)
    tokens = min(next(n for n in BUCKETS if n >= T), longest(K))
    body = _body(H, K, x.eps, x.key_eps, tokens, x.lengths is not None, tape)
    y, S, *taped = launch(
        "time_mix",
        ("mixer", "stage", "decode", "rwkv7", "time_mix"),
        body,
        {**x.arrays(*_INPUTS, "S", "lengths"), "T": T},
        outputs,
        (32 * SIMD_GROUPS, H, B),
        (32 * SIMD_GROUPS, 1, 1),
    )
    return Mixed(y, S, tape=Tape(**dict(zip(_TAPE, taped[0], strict=True))) if tape else None)


@cache
def _body(H: int, K: int, eps: float, key_eps: float, tokens: int, ragged: bool, tape: bool) -> str:
    spec, lanes = _spec(H, K), lanes_per_row(K)
    at = Record.of(spec, K)

    def seen(*names: str) -> str:
        return ", ".join(view(name, name != "lengths" or ragged) for name in names)

    def channels(name: str) -> str:
        return f"channels<0>({seen(name)}, {none}, {none}, {none})"

    def taped(name: str) -> str:
        return f"tape + {_TAPE.index(name)} * all" if tape else "Absent()"

    none = "view(Absent())"
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    offsets = f"{at.keys}, {at.values}, {at.decays}, {at.a}, {at.b}, {at.betas}, -1"
    lines = [
        f"threadgroup float x[{tokens * at.size}];",
        *([f"const int64_t all = int64_t(threadgroups_per_grid.z) * T * {H * K};"] if tape else []),
        f"const Place p = place_of(threadgroup_position_in_grid, {K}, {H}, {H}, 1, {seen('lengths')}, T, "
        f"simdgroup_index_in_threadgroup, {SIMD_GROUPS}, thread_index_in_simdgroup);",
        f"stage_vectors<{K}, {at.size}, IDENTITY, AS_IS>(x, {channels('r')}, p.hv * {K}, 1.0f, p);",
        f"stage_values<{K}, {at.size}, IDENTITY>(x + {at.values}, {channels('v')}, p.hv * {K}, p);",
        f"stage_removal<{K}, {at.size}>(x + {at.keys}, x + {at.a}, x + {at.b}, {seen('k', 'rate', 'k_k', 'k_a')}, "
        f"{literal(key_eps)}, p);",
        f"const auto g = {gates(spec, lambda name: view(name, name == 'decay'))};",
        f"stage_decays<{K}, {at.size}>(x + {at.decays}, g, p.hv, {taped('g')}, {'T' if tape else 'p.n'}, {H}, p);",
        barrier,
        f"recur<{K}, {K}, {lanes}, {at.size}, CHANNEL_DECAY, LOW_RANK, 1, {offsets}>(x, {seen('S')}, {none}, "
        f"normaliser({none}, Absent(), 0.0f), S_out, {taped('u')}, {taped('z')}, T, {H}, {K}, p);",
        *(
            f"record<{K}, {at.size}>(x + {where}, {taped(name)}, T, {H}, p.hv, p);"
            for name, where in (("k", at.keys), ("b", at.b))
            if tape
        ),
        barrier,
        f"finish_time_mix<{K}, {at.size}, {at.keys}, {at.values}>(x, {seen('v', 'r_k', 'gain', 'bias', 'gate')}, "
        f"{literal(eps)}, y, T, {H}, p);",
    ]
    return "\n".join(lines)


def prepare(x: TimeMix) -> Prepared:
    """What the recurrence of any number of tokens reads; k, a, b and g are zero past the last real token of a row."""
    B, T, H, K = x.sizes
    r, v = (z.reshape(B, T, H, K) for z in (x.r, x.v))
    outputs: Outputs = {name: (r.shape, x.r.dtype) for name in ("key", "a", "b")} | {"g": (r.shape, mx.float32)}
    read = ("k", "rate", "k_k", "k_a")
    lines = [
        *_place(H, x.lengths is not None),
        f"const auto decays = {gates(x.spec, lambda name: view(name, name == 'decay'))};",
        f"Removal<{K}> x;",
        f"x.key = x.a = x.b = zero_vector<{K}>();",
        f"if (real) x = removal_of<{K}>({_rows(*read)}, {literal(x.key_eps)}, lane);",
        *(f"store(x.{name}, {name}, at, lane);" for name in ("key", "a", "b")),
        f"store_decays<{K}>(decays, g, at, batch, t, h, real, lane);",
    ]
    arrays = {**x.arrays(*read, "decay", "lengths"), "T": T}
    files, grid = ("mixer", "prefill", "rwkv7"), (32, H, B * T)
    k, a, b, g = launch("time_mix_prefill", files, "\n".join(lines), arrays, outputs, grid, (32, 4, 1))
    return Prepared(r, k, v, g, a=a, b=b)


def finish(x: TimeMix, k: mx.array, out: mx.array) -> mx.array:
    """y [B, T, D] from the outputs of the recurrence and the keys it read, both [B, T, H, K]."""
    B, T, H, K = x.sizes
    arrays = x.arrays("r", "r_k", "v", "gain", "bias", "gate", "lengths") | {"k": k, "out": out}
    rows = _rows("out", "r", "k", "r_k", "v", "gain", "bias", "gate")
    call = f"finish_head<{K}>({rows}, {literal(x.eps)}, y + at * {K}, real, lane);"
    lines = [*_place(H, x.lengths is not None), call]
    outputs: Outputs = {"y": ((B, T, H * K), x.r.dtype)}
    files, grid = ("mixer", "rwkv7"), (32, H, B * T)
    return launch("time_mix_finish", files, "\n".join(lines), {**arrays, "T": T}, outputs, grid, (32, 4, 1))[0]


def _rows(*names: str) -> str:
    """A head's vectors of inputs: of a token, or of the layer."""
    places = {name: "0, 0" if name in _PARAMETERS else "batch, t" for name in names}
    return ", ".join(f"row({view(name)}, {place}, h)" for name, place in places.items())


def _place(H: int, ragged: bool) -> list[str]:
    """Which token and head a SIMD-group has."""
    return [
        "const int batch = thread_position_in_grid.z / T, t = thread_position_in_grid.z % T;",
        "const int h = thread_position_in_grid.y, lane = thread_index_in_simdgroup;",
        f"const bool real = t < real_tokens({view('lengths', ragged)}, batch, T);",
        f"const int64_t at = (int64_t(batch) * T + t) * {H} + h;",
    ]
