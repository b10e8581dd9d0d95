"""Launchers of `decode`, a whole mixer for up to sixteen tokens in one dispatch, and of `replay`, which takes some of
them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from mlxlin.backend import mx

from .kernels import Outputs, lanes_per_row, launch, literal, view
from .mixer import VECTOR_EPS, FusedSpec, Mixed, Projected, Record, Tape, finishes, parts

SIMD_GROUPS = 8
BUCKETS = (1, 2, 4, 8, 16)  # tokens that threadgroup memory is made for
ACTIVATION = {
    "none": "IDENTITY",
    "silu": "SILU",
    "sigmoid": "GATE_SIGMOID",
    "relu": "RELU",
    "elu": "ELU_PLUS_ONE",
    "silu_twice": "SILU_TWICE",
}
MAP = ACTIVATION | {"dpfp": "DPFP", "product": "PRODUCT", "hedgehog": "HEDGEHOG"}
_NORM = {"none": "AS_IS", "l2": "L2", "sum": "SUM", "simplex": "SIMPLEX", "rms": "L2"}
_DECAY = {"none": "NO_DECAY", "head": "HEAD_DECAY", "channel": "CHANNEL_DECAY"}
_WRITE = {"add": "ADD", "delta": "DELTA", "low_rank": "LOW_RANK"}
_TAPE = ("tape_k", "tape_u", "tape_g", "tape_z", "tape_b", "tape_keys")
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

Spell = Callable[[str], str]


def decode(spec: FusedSpec, x: Projected, *, tape: bool = False) -> Mixed:
    """Run a mixer over T <= `longest(spec, batch)` tokens.

    Where `finishes` says no, y comes without the norm and the gate of `spec`.
    """
    (B, T, _), dtype = x.first.shape, x.first.dtype
    outputs: Outputs = {"y": ((B, T, spec.value_heads, spec.value_dim), dtype), "S_out": (x.S.shape, mx.float32)}
    if spec.taps:
        outputs["memory_out"] = ((B, spec.taps - 1, spec.width), dtype)
    states = {"Z": x.Z, "S_keys": x.S_keys}
    outputs |= {f"{name}_out": (z.shape, mx.float32) for name, z in states.items() if z is not None}
    if tape:
        outputs |= _tape_outputs(spec, B, T)
    arrays = {name: array for name, array in inputs(spec, x).items() if array is not None}
    results = launch(
        "decode",
        ("mixer", "stage", "decode", "slots") if spec.slots else ("mixer", "stage", "decode"),
        _body(spec, B, T, tuple(arrays), tuple(outputs)),
        {**arrays, "T": T},
        outputs,
        (32 * SIMD_GROUPS * parts(spec, B), spec.value_heads, B),
        (32 * SIMD_GROUPS, 1, 1),
    )
    found = dict(zip(outputs, results, strict=True))
    found_tape = _tape(found) if tape else None
    Z, memory, S_keys = (found.get(f"{name}_out") for name in ("Z", "memory", "S_keys"))
    return Mixed(found["y"], found["S_out"], Z, memory, found_tape, S_keys)


def replay(spec: FusedSpec, S: mx.array, tape: Tape, accepted: mx.array) -> mx.array:
    """The state after the first `accepted` [B] tokens of a tape, bit for bit as if no others had been run."""
    return _replay(_DECAY[spec.decay], spec.substeps, S, tape, accepted)


def replay_keys(spec: FusedSpec, S_keys: mx.array, tape: Tape, accepted: mx.array) -> mx.array:
    """The same of the keys of slots."""
    assert tape.keys is not None
    into_keys = Tape(k=tape.keys, u=mx.repeat(tape.k, spec.repeats, axis=2), g=tape.g)
    return _replay("VALUE_DECAY", 1, S_keys, into_keys, accepted)


def _replay(decay: str, substeps: int, S: mx.array, tape: Tape, accepted: mx.array) -> mx.array:
    B, HV, V, K = S.shape
    T, lanes = tape.k.shape[1] // substeps, lanes_per_row(K)
    g = tape.g[..., None] if tape.g is not None and tape.g.ndim == 3 else tape.g
    arrays = {"S": S, "g": g, "k": tape.k, "u": tape.u, "z": tape.z, "b": tape.b, "accepted": accepted}
    views = ", ".join(view(name, array is not None) for name, array in arrays.items())
    call = (
        f"replay<{K}, {lanes}, {decay}, {substeps}>({views}, T, {tape.k.shape[2]}, {HV}, {V}, S_out, "
        "thread_position_in_grid, thread_index_in_simdgroup);"
    )
    groups = V * lanes // 32
    outputs: Outputs = {"S_out": (S.shape, mx.float32)}
    grid, threadgroup = (32, groups, B * HV), (32, min(8, groups), 1)
    return launch("replay", ["replay"], call, {**arrays, "T": T}, outputs, grid, threadgroup)[0]


def _tape_outputs(spec: FusedSpec, B: int, T: int) -> Outputs:
    H, HV, n = spec.heads // spec.repeats, spec.value_heads, spec.substeps
    outputs: Outputs = {
        "tape_k": ((B, T * n, H, spec.state_dim), mx.float32),
        "tape_u": ((B, T * n, HV, spec.value_dim), mx.float32),
    }
    if spec.decay != "none":
        outputs["tape_g"] = ((B, T, HV, *([spec.state_dim] if spec.decay == "channel" else [])), mx.float32)
    if spec.slots:
        outputs["tape_keys"] = ((B, T, H, spec.key_dim), mx.float32)
    if spec.write == "low_rank":
        outputs["tape_z"] = ((B, T, HV, spec.value_dim), mx.float32)
        outputs["tape_b"] = ((B, T, H, spec.key_dim), mx.float32)
    return outputs


def _tape(found: Mapping[str, mx.array]) -> Tape:
    return Tape(**{name.removeprefix("tape_"): found[name] for name in _TAPE if name in found})


def inputs(spec: FusedSpec, x: Projected) -> dict[str, mx.array | None]:
    """The inputs of the kernel, four-dimensional as it sees them."""
    B, T, _ = x.first.shape
    per_token: dict[str, mx.array | None] = {}
    per_token |= dict(zip("qkv", x.qkv, strict=True)) if isinstance(x.qkv, tuple) else {"qkv": x.qkv}
    per_token |= {name: getattr(x, name) for name in ("memory", "beta", "a", "b", "gate", "cos", "sin")}
    arrays = {name: None if z is None else z[:, :, None] for name, z in per_token.items()}
    vectors = {name: getattr(x, name) for name in ("bias", "q_gain", "k_gain")}
    of_heads = {name: getattr(x, name) for name in ("norm", "norm_bias")}
    heads = spec.decay_heads
    return {
        **arrays,
        "weight": None if x.weight is None else x.weight[None, :, None],
        "decay": None if x.decay is None else x.decay.reshape(B, T, heads, -1),
        "reader": None if x.reader is None else x.reader[None, :, :, None],
        "bonus": None if x.bonus is None else x.bonus[None, None],
        "rate": None if x.rate is None else x.rate[None, None, :, None],
        "decay_bias": None if x.decay_bias is None else x.decay_bias.reshape(1, 1, heads, -1),
        **{name: None if z is None else z[None, None, None] for name, z in vectors.items()},
        **{name: None if z is None else _by_head(spec, z) for name, z in of_heads.items()},
        "skip": None if x.skip is None else mx.broadcast_to(x.skip, x.S.shape[1:3])[None, None],
        "S": x.S,
        "S_keys": x.S_keys,
        "Z": None if x.Z is None else x.Z[None],
        "lengths": x.lengths,
    }


def _by_head(spec: FusedSpec, z: mx.array) -> mx.array:
    """z [V] or [HV V] as [1, 1, HV, V]; a view: the kernel follows its strides."""
    return mx.broadcast_to(z.reshape(1, 1, -1, spec.value_dim), (1, 1, spec.value_heads, spec.value_dim))


def gates(spec: FusedSpec, seen: Spell) -> str:
    """The log decays of a mixer in a kernel's body; `seen` spells an input."""
    x = f"heads_of<{spec.key_dim}>({channels(spec, seen, 'decay')})" if spec.convolves_decay else seen("decay")
    numbers = (spec.decay_constant, spec.decay_floor, spec.shortest, spec.longest)
    arguments = [x, seen("rate"), seen("decay_bias"), *map(literal, numbers)]
    return f"gates<{spec.decay_kind.upper()}>({', '.join(arguments)})"


def channels(spec: FusedSpec, seen: Spell, name: str) -> str:
    """The projected channels of an input behind the convolution."""
    views = [seen(part) for part in ("memory", "weight", "bias")]
    if name == "decay":
        views = [f"behind({part}, {spec.width - spec.keys})" for part in views]
    return f"channels<{spec.taps}>({', '.join([seen(name), *views])})"


def vector_norm(spec: FusedSpec, stream: str) -> tuple[str, float, float]:
    """What is done to queries or keys: the norm as Metal calls it, the factor on the result, and the norm's epsilon.

    An RMS norm is one to length 1 with another epsilon, times sqrt(K).
    """
    kind, scale = (spec.q_norm, spec.scale) if stream == "q" else (spec.k_norm, 1.0)
    if kind == "rms":
        return _NORM[kind], scale * spec.key_dim**0.5, spec.qk_eps * spec.key_dim
    return _NORM[kind], scale, VECTOR_EPS.get(kind, 0.0)


@cache  # spelling it out costs the host more than everything else about a dispatch
def _body(spec: FusedSpec, batch: int, T: int, arrays: tuple[str, ...], outputs: tuple[str, ...]) -> str:
    """The text of a decode kernel for T tokens, from which inputs and outputs there are."""
    record = Record.of(spec, spec.value_dim // parts(spec, batch))
    tokens = min(next(n for n in BUCKETS if n >= T), max(T, Record.FLOATS // record.size))
    return "\n".join(_Body(spec, record, arrays, outputs, batch).lines(tokens))


class _Body:
    """The calls that make up a decode kernel."""

    def __init__(
        self, spec: FusedSpec, record: Record, arrays: tuple[str, ...], outputs: tuple[str, ...], batch: int
    ) -> None:
        self._spec = spec
        self._at = record
        self._arrays = arrays
        self._outputs = outputs
        self._finishes = finishes(spec, batch)
        self._rows = spec.value_dim // parts(spec, batch)

    def lines(self, tokens: int) -> list[str]:
        """In order; threadgroup memory is made for so many tokens."""
        spec = self._spec
        return [
            f"threadgroup float x[{tokens * self._at.size}];",
            f"const Place p = place_of(threadgroup_position_in_grid, {self._rows}, {spec.heads}, {spec.value_heads}, "
            f"{spec.repeats}, {self._view('lengths')}, T, simdgroup_index_in_threadgroup, {SIMD_GROUPS}, "
            "thread_index_in_simdgroup);",
            *self._vectors(),
            *self._values(),
            *self._gates(),
            _BARRIER,
            *([*self._turns(), _BARRIER] if spec.rotary else []),
            *(self._fits() if spec.slots else []),
            self._recurrence(),
            *self._taped(),
            _BARRIER,
            self._finish(),
        ]

    def _view(self, name: str) -> str:
        return view(name, name in self._arrays)

    def _out(self, name: str) -> str:
        return name if name in self._outputs else "Absent()"

    def _channels(self, stream: str) -> str:
        return channels(self._spec, self._view, stream if stream in self._arrays else "qkv")

    def _first(self, stream: str, j: int = 0) -> str:
        """The first channel of this threadgroup's head in sub-token j of a stream."""
        spec = self._spec
        start = spec.starts[stream] if "qkv" in self._arrays else 0
        size = spec.value_dim if stream == "v" else spec.head_dim
        heads = (spec.value_heads if stream == "v" else spec.heads) // spec.repeats
        head = {"q": "p.h", "k": f"({j * heads} + p.kh)", "v": f"({j * heads} + p.vh)"}[stream]
        return f"{start} + {head} * {size}"

    def _vectors(self) -> list[str]:
        """Queries, keys, and a and b of a low-rank write."""
        spec, at, lines = self._spec, self._at, []
        places = [("q", 0, 0), *(("k", j, at.keys + j * spec.key_dim) for j in range(spec.substeps))]
        places = places[:1] if spec.decay_kind == "forget" else places
        activations = {"q": spec.q_activation, "k": spec.k_activation}
        sizes = f"{spec.key_dim}, {at.size}"
        for stream, j, where in places:
            first = self._first(stream, j)
            norm, scale, eps = ("AS_IS", 1.0, 0.0) if spec.reader else vector_norm(spec, stream)
            kind = f"{sizes}, {ACTIVATION[activations[stream]]}, {norm}, {MAP[spec.features]}"
            numbers = f"{first}, {literal(scale)}, p, {literal(eps)}"
            lines.append(f"stage_vectors<{kind}>(x + {where}, {self._channels(stream)}, {numbers});")
            if f"{stream}_gain" in self._arrays:
                lines.append(f"stage_gains<{sizes}>(x + {where}, {self._view(f'{stream}_gain')}, p);")
            if spec.taps:
                lines.append(self._remember(stream, first, spec.head_dim))
        if spec.reader:
            kind = f"{sizes}, {at.keys}, {at.a}"
            lines.append(f"stage_reader<{kind}>(x, {self._view('reader')}, {literal(spec.scale)}, p);")
        if spec.bonus:
            lines.append(f"stage_bonuses<{sizes}, {at.keys}, {at.bonus}>(x, {self._view('bonus')}, p);")
        for stream, where in (("a", at.a), ("b", at.b)) if spec.write == "low_rank" else ():
            given = f"channels<0>({self._view(stream)}, view(Absent()), view(Absent()), view(Absent()))"
            lines.append(
                f"stage_vectors<{sizes}, IDENTITY, AS_IS>(x + {where}, {given}, p.h * {spec.key_dim}, 1.0f, p);"
            )
        return lines

    def _values(self) -> list[str]:
        spec, lines = self._spec, []
        for j in range(spec.substeps):
            first = self._first("v", j)
            kind = f"{self._rows}, {self._at.size}, {ACTIVATION[spec.v_activation]}"
            where = self._at.values + j * self._rows
            lines.append(f"stage_values<{kind}>(x + {where}, {self._channels('v')}, {first}, p);")
            if spec.taps:
                lines.append(self._remember("v", f"{first} + p.v0", self._rows))
        return lines

    def _remember(self, stream: str, first: str, count: int) -> str:
        """The raw inputs of some channels, by one of the threadgroups that read them."""
        out = f"offset_by(memory_out, {self._spec.width - self._spec.keys})" if stream == "decay" else "memory_out"
        condition = {"q": "p.first_of_query", "v": "p.first_of_value"}.get(stream, "p.first_of_key")
        return (
            f"if ({condition}) remember({self._channels(stream)}, {out}, p.batch, p.n, {self._spec.width}, "
            f"{first} + thread_of(p), {first} + {count}, {32 * SIMD_GROUPS});"
        )

    def _turns(self) -> list[str]:
        """Queries and keys by their positions."""
        spec, angles = self._spec, f"{self._view('cos')}, {self._view('sin')}"
        kind = f"{spec.rotary}, {str(spec.interleaved).lower()}, {self._at.size}"
        places = [0, *(self._at.keys + j * spec.key_dim for j in range(spec.substeps))]
        return [f"turn<{kind}>(x + {where}, {angles}, p);" for where in places]

    def _gates(self) -> list[str]:
        spec, at, lines = self._spec, self._at, []
        if spec.decay != "none":
            channels = spec.state_dim if spec.decay == "channel" else 1
            head = "p.hv" if spec.decay_heads == spec.value_heads else "p.vh"
            lines.append(f"const auto g = {gates(spec, self._view)};")
            lines.append(
                f"stage_decays<{channels}, {at.size}>(x + {at.decays}, g, {head}, {self._out('tape_g')}, T, "
                f"{spec.value_heads}, p);"
            )
        if spec.slots:
            places = ", ".join(f"x + {where}" for where in (at.decays, at.lost, at.fits))
            lines.append(f"stage_lost<{spec.slots}, {at.size}>({places}, p);")
        if spec.scales_values:
            lines.append(f"stage_steps<{at.size}>(x + {at.step}, g, p);")
        if spec.decay_kind == "forget":
            lines.append(f"stage_forgotten<{spec.key_dim}, {at.size}>(x + {at.keys}, g, p);")
        if spec.convolves_decay:
            lines.append(self._remember("decay", f"p.kh * {spec.key_dim}", spec.key_dim))
        for j in range(spec.substeps if spec.write == "delta" else 0):
            lines.append(
                f"stage_betas<{at.size}, {ACTIVATION[spec.beta]}>(x + {at.betas + j}, {self._view('beta')}, "
                f"{j * spec.value_heads} + p.hv, {literal(spec.beta_factor)}, p);"
            )
        return lines

    def _fits(self) -> list[str]:
        """How well the query fits the key of each slot, and the softmax of that, which reads their values."""
        spec, at, absent = self._spec, self._at, view("Absent()", False)
        kind = f"{spec.key_dim}, {spec.slots}, {lanes_per_row(spec.key_dim)}, {at.size}, VALUE_DECAY, ADD, 1"
        return [
            f"recur<{kind}, {at.keys}, {at.fits}, {at.decays}, 0, 0, 0, -1>(x, {self._view('S_keys')}, {absent}, "
            f"normaliser({absent}, Absent(), 0.0f), written_once(S_keys_out, p.first_of_head), Absent(), Absent(), T, "
            f"{spec.value_heads}, {spec.slots}, whole(p));",
            _BARRIER,
            f"stage_softmax<{spec.slots}, {at.size}>(x + {at.fits}, p);",
            _BARRIER,
        ]

    def _recurrence(self) -> str:
        spec, at, K = self._spec, self._at, self._spec.state_dim
        query, keys = (at.fits, at.lost) if spec.slots else (0, at.keys)
        kind = f"{K}, {self._rows}, {lanes_per_row(K)}, {at.size}, {_DECAY[spec.decay]}"
        places = ", ".join(str(where - query) for where in (keys, at.values, at.decays, at.a, at.b, at.betas))
        step, bonus = at.step if spec.scales_values else -1, at.bonus if spec.bonus else -1
        sums = f"normaliser({self._view('Z')}, {self._out('Z_out')}, {literal(spec.normalize or 0.0)})"
        write = "READER_DELTA" if spec.reader else _WRITE[spec.write]
        return (
            f"recur<{kind}, {write}, {spec.substeps}, {places}, {step}, {bonus}>(x + {query}, {self._view('S')}, "
            f"{self._view('skip')}, {sums}, S_out, "
            f"{self._out('tape_u')}, {self._out('tape_z')}, T, {spec.value_heads}, {spec.value_dim}, p);"
        )

    def _taped(self) -> list[str]:
        """Keys, what slots let go of and b, once per key head."""
        spec, at = self._spec, self._at
        H, K, n = spec.heads // spec.repeats, spec.key_dim, spec.substeps
        keys = "tape_keys" if spec.slots else "tape_k"
        vectors = [(keys, K, at.keys + j * K, H * n, j * H) for j in range(n)]
        vectors += [("tape_k", spec.slots, at.lost, H, 0)] if spec.slots else [("tape_b", K, at.b, H, 0)]
        return [
            f"if (p.first_of_key) record<{D}, {at.size}>(x + {where}, {name}, T, {heads}, {head} + p.kh, p);"
            for name, D, where, heads, head in vectors
            if name in self._outputs
        ]

    def _finish(self) -> str:
        spec, whole = self._spec, self._finishes
        outputs = self._at.values + (spec.substeps - 1) * self._rows
        flags = ", ".join(str(whole and flag).lower() for flag in (spec.norm, spec.centered))
        kind = f"{self._rows}, {self._at.size}, {flags}, {ACTIVATION[spec.gate] if whole else 'IDENTITY'}"
        views = ", ".join(self._view(name) for name in ("norm", "norm_bias", "gate"))
        return (
            f"finish<{kind}>(x + {outputs}, {views}, {literal(spec.eps)}, y, T, {spec.value_heads}, {spec.value_dim}, "
            "p);"
        )
