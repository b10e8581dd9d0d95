"""Launcher of `prefill`: what a mixer does between its projections and its recurrence, for any number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mlxlin.backend import mx

from .decode import ACTIVATION, MAP, channels, gates, inputs, vector_norm
from .kernels import Outputs, launch, literal, view
from .mixer import FusedSpec, Projected

_SIMD_GROUPS = 8


@dataclass(frozen=True, eq=False)
class Prepared:
    """The arguments of a recurrence, and what goes around it. What a kernel made is zero past the last real token of a
    row, what was projected as it is needed is a view.

    Attributes:
        q, k, v: [B, T, H, K], [B, T n, H, K] and [B, T n, HV, V] in the dtype of the projections. With a bonus there
            are T + 1 tokens; q lacks the last of them, k, v and g the first: what is read is what was before.
        g: [B, T, HV(, K)] in float32, with slots [B, T, HV, M]; then there is lost, 1 - exp(g).
        beta: [B, T n, HV]. a, b: [B, T, H, K]. A delta rule with a reader a comes as a low-rank write, H = HV:
            S + beta (v - S a) k^T = S + (S a) b^T + (beta v) k^T with b = -beta k.
        bypass: factors [HV, V], [HV, 1] or [B, T, HV, 1] in float32, and what they multiply, v [B, T, HV, V]: added to
            the output.
        memory: of the convolution.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array | None = None
    beta: mx.array | None = None
    a: mx.array | None = None
    b: mx.array | None = None
    lost: mx.array | None = None
    bypass: tuple[mx.array, mx.array] | None = None
    memory: mx.array | None = None


def prefill(spec: FusedSpec, x: Projected) -> Prepared:
    """Convolution, features, norms of vectors, rotation and gates, in one dispatch, or in none where there are none."""
    found = _as_projected(spec, x)
    outputs = {name: output for name, output in _outputs(spec, x).items() if name not in found}
    if outputs:
        found |= _made(spec, x, outputs)
    own, bypassing = found.pop("own", None), found.pop("bypassing", found["v"])
    bypass = None if x.skip is None else (x.skip, bypassing)
    if own is not None:
        groups = spec.value_heads // spec.heads
        own = own[:, :-1, :, None]
        bypass = (own if groups == 1 else mx.repeat(own, groups, axis=2), bypassing[:, 1:])
    return Prepared(**found, bypass=bypass)


def _made(spec: FusedSpec, x: Projected, outputs: Outputs) -> dict[str, mx.array]:
    B, T, _ = x.first.shape
    arrays = {f"{name}_in": array for name, array in inputs(spec, x).items() if array is not None}
    body, vectors = _body(spec, tuple(arrays), tuple(outputs))
    read = {name: array for name, array in arrays.items() if view(name) in body}
    grid, threadgroup = (32, vectors, B * (T + spec.bonus)), (32, _SIMD_GROUPS, 1)
    results = launch("prefill", ("mixer", "prefill"), body, {**read, "T": T}, outputs, grid, threadgroup)
    return dict(zip(outputs, results, strict=True))


def _outputs(spec: FusedSpec, x: Projected) -> Outputs:
    """What the recurrence needs, and what goes around it, as a kernel would write it."""
    (B, T, _), dtype = x.first.shape, x.first.dtype
    H, HV, K, V, n = spec.heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.substeps
    T, H = T + spec.bonus, HV if spec.reader else H
    outputs: Outputs = {
        "q": ((B, T, H, K), dtype),
        "k": ((B, T * n, H, K), dtype),
        "v": ((B, T * n, HV, V), dtype),
    }
    if spec.decay != "none":
        outputs["g"] = ((B, T, HV, *([spec.state_dim] if spec.decay == "channel" else [])), mx.float32)
    if spec.slots:
        outputs["lost"] = outputs["g"]
    if spec.reader:
        outputs |= {"a": outputs["k"], "b": outputs["k"]}
    elif spec.write == "delta":
        outputs["beta"] = ((B, T * n, HV), mx.float32)
    if spec.bonus:
        outputs["own"] = ((B, T, H), mx.float32)
    if spec.skip and spec.scales_values:
        outputs["bypassing"] = outputs["v"]
    if spec.taps:
        outputs["memory"] = ((B, spec.taps - 1, spec.width), dtype)
    return outputs


def _as_projected(spec: FusedSpec, x: Projected) -> dict[str, mx.array]:
    """The arguments of the recurrence that nothing has to be done to."""
    alone = not spec.taps and spec.substeps == 1 and not spec.bonus
    plain = alone and spec.features == "none" and not spec.rotary and not spec.reader
    untouched = {
        "q": plain and spec.q_activation == spec.q_norm == "none" and spec.scale == 1.0,
        "k": plain and spec.k_activation == spec.k_norm == "none" and spec.repeats == 1 and spec.decay_kind != "forget",
        "v": alone and spec.v_activation == "none" and spec.repeats == 1 and not _changes_values(spec),
    }
    B, T, _ = x.first.shape
    found = {
        name: _stream(spec, x, name).reshape(B, T, -1, spec.value_dim if name == "v" else spec.key_dim)
        for name, as_it_is in untouched.items()
        if as_it_is
    }
    if x.decay is not None and spec.decay_kind == "given":
        found["g"] = x.decay.reshape(B, T, spec.value_heads, *([-1] if spec.decay == "channel" else []))
    if x.beta is not None and not spec.reader and alone and spec.beta == "none" and spec.beta_factor == 1.0:
        found["beta"] = x.beta
    if x.a is not None and x.b is not None:
        found |= {name: z.reshape(B, T, spec.heads, -1) for name, z in (("a", x.a), ("b", x.b))}
    return found


def _changes_values(spec: FusedSpec) -> bool:
    """Whether what is written of v is another than v, or what bypasses the recurrence has to be zero behind the end."""
    return spec.scales_values or spec.skip or spec.reader


def _stream(spec: FusedSpec, x: Projected, name: str) -> mx.array:
    """q, k or v as projected."""
    if isinstance(x.qkv, tuple):
        return x.qkv["qkv".index(name)]
    starts = spec.starts
    return x.qkv[..., starts[name] : {"q": starts["k"], "k": starts["v"]}.get(name)]


@cache  # see decode
def _body(spec: FusedSpec, arrays: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[str, int]:
    """The text of a kernel, from which inputs and outputs there are, and SIMD-groups per token."""
    return _Body(spec, arrays, outputs).text()


class _Body:
    """The calls that make up a prefill kernel: one branch of SIMD-groups for each of q, k and v."""

    def __init__(self, spec: FusedSpec, arrays: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        self._spec = spec
        self._arrays = arrays
        self._outputs = outputs

    def text(self) -> tuple[str, int]:
        spec, first = self._spec, 0
        heads = self._heads
        branches = {
            "q": (heads, self._query_or_key("q")),
            "k": (heads * spec.substeps, self._query_or_key("k")),
            "v": (spec.value_heads * spec.substeps, [*self._values(), *self._gates()]),
        }
        lines = self._place()
        for stream, (count, calls) in branches.items():
            if not calls:
                continue
            late = " - 1" if spec.bonus and stream != "q" else ""
            lines += [
                f"if (group < {first + count}) {{",
                f"const int vector = group - {first}, t = slot{late};",
                "const bool real = t >= 0 && t < n;",
                *calls,
                "} else",
            ]
            first += count
        return "\n".join([*lines[:-1], "}"]), first

    def _place(self) -> list[str]:
        spec = self._spec
        scratch = f"threadgroup float scratch[{_SIMD_GROUPS * spec.key_dim}];"
        return [
            *([scratch] if spec.rotary else []),
            f"const int slots = T{' + 1' if spec.bonus else ''};",
            "const int batch = thread_position_in_grid.z / slots, slot = thread_position_in_grid.z % slots;",
            "const int group = thread_position_in_grid.y, lane = thread_index_in_simdgroup;",
            f"const int n = real_tokens({self._view('lengths')}, batch, T);",
            "const int64_t token = int64_t(batch) * slots + slot;",
            *([f"const auto decays = {gates(spec, self._view)};"] if "g" in self._outputs else []),
        ]

    def _view(self, name: str) -> str:
        return view(f"{name}_in", f"{name}_in" in self._arrays)

    @property
    def _heads(self) -> int:
        """Of queries and keys; a low-rank write has them by value heads, for beta is."""
        return self._spec.value_heads if self._spec.reader else self._spec.heads

    def _shared(self, stream: str) -> int:
        """How many vectors are made of a projected head."""
        spec = self._spec
        if spec.reader and stream != "v":
            return spec.value_heads // spec.heads
        return 1 if stream == "q" else spec.repeats

    def _head(self, stream: str) -> str:
        """The projected head, sub-tokens counted, that a vector is made of."""
        n = self._shared(stream)
        return "vector" if n == 1 else f"vector / {n}"

    def _channels(self, stream: str) -> str:
        return channels(self._spec, self._view, stream if f"{stream}_in" in self._arrays else "qkv")

    def _first(self, stream: str) -> str:
        """The first channel of a vector."""
        start = self._spec.starts[stream] if "qkv_in" in self._arrays else 0
        return f"{start} + {self._head(stream)} * {self._channels_of(stream)}"

    def _channels_of(self, stream: str) -> int:
        """Channels of a head."""
        return self._spec.value_dim if stream == "v" else self._spec.head_dim

    def _vector(self, stream: str, norm: str = "AS_IS", scale: float = 1.0, eps: float = 0.0) -> str:
        """A vector of a stream."""
        spec = self._spec
        activation = {"q": spec.q_activation, "k": spec.k_activation, "v": spec.v_activation}[stream]
        size, features = (spec.value_dim, "none") if stream == "v" else (spec.key_dim, spec.features)
        kind = f"{size}, {ACTIVATION[activation]}, {norm}, {MAP[features]}"
        numbers = f"{self._first(stream)}, {literal(scale)}, lane, {literal(eps)}"
        return f"vector_of<{kind}>({self._channels(stream)}, batch, t, {numbers})"

    def _made(self, stream: str, vector: str) -> list[str]:
        """x, a vector."""
        size = self._spec.value_dim if stream == "v" else self._spec.key_dim
        return [f"Lanes<{size}> x = zero_vector<{size}>();", f"if (real) x = {vector};"]

    def _remembered(self, stream: str) -> list[str]:
        """The end of a vector's channels, to the convolution's memory."""
        spec, out = self._spec, "memory"
        if not spec.taps:
            return []
        first, size = self._first(stream), self._channels_of(stream)
        if stream == "k" and spec.convolves_decay:
            stream, out, first = "decay", f"memory + {spec.width - spec.keys}", f"{self._head('k')} * {size}"
        shared = self._shared(stream)
        place = f"{out}, batch, n, {spec.width}, {first} + lane, {first} + {size}, 32"
        first_of_head = "" if shared == 1 else f" && vector % {shared} == 0"
        return [f"if (t == 0{first_of_head}) remember({self._channels(stream)}, {place});"]

    def _query_or_key(self, stream: str) -> list[str]:
        spec, K = self._spec, self._spec.key_dim
        heads = self._heads * (1 if stream == "q" else spec.substeps)
        if stream not in self._outputs:
            return []
        if spec.reader:
            lines = [*self._made(stream, self._vector(stream)), *self._read(stream)]
        elif stream == "k" and spec.decay_kind == "forget":
            lines = self._made(stream, f"forgotten_key<{K}>(decays, batch, t, {self._head('k')}, lane)")
        else:
            lines = self._made(stream, self._vector(stream, *vector_norm(spec, stream)))
        if f"{stream}_gain_in" in self._arrays:
            lines.append(f"x = with_gains(x, {self._view(f'{stream}_gain')}, lane);")
        if spec.rotary:
            kind = f"{spec.rotary}, {str(spec.interleaved).lower()}"
            scratch = f"scratch + {K} * simdgroup_index_in_threadgroup"
            angles = f"{self._view('cos')}, {self._view('sin')}"
            lines.append(f"if (real) x = turned<{kind}>(x, {angles}, {scratch}, batch, t, lane);")
        if stream == "q" and spec.bonus:
            sum_ = f"product_of(x, {self._vector('k', *vector_norm(spec, 'k'))}, {self._view('bonus')}, vector, lane)"
            lines += [
                f"const float sum = real ? {sum_} : 0.0f;",
                f"if (lane == 0) own[token * {heads} + vector] = sum;",
            ]
        return [*lines, f"store(x, {stream}, token * {heads} + vector, lane);", *self._remembered(stream)]

    def _read(self, stream: str) -> list[str]:
        """What a reader that is a fraction of the key makes of queries and keys; and itself, beside the keys."""
        head = self._head("q")
        fraction, correction = (f"load(row({self._view('reader')}, 0, {i}, {head}), 0)" for i in (0, 1))
        if stream == "q":
            changed = f"without(x, {self._vector('k')}, {fraction} * {correction})"
            return [f"if (real) x = of_unit_length({changed}, {literal(self._spec.scale)});"]
        reader = f"of_unit_length(times(x, {fraction}), 1.0f)"
        place = f"token * {self._heads} + vector, lane"
        return [
            f"store({reader}, a, {place});",
            "x = of_unit_length(x, 1.0f);",
            f"store(times(x, -({self._beta()})), b, {place});",
        ]

    def _beta(self) -> str:
        beta = f"activated<{ACTIVATION[self._spec.beta]}>(load(row({self._view('beta')}, batch, t, 0), vector))"
        return f"real ? {literal(self._spec.beta_factor)} * {beta} : 0.0f"

    def _values(self) -> list[str]:
        spec, heads = self._spec, self._spec.value_heads * self._spec.substeps
        if "v" not in self._outputs:
            return []
        lines, at = self._made("v", self._vector("v")), f"token * {heads} + vector, lane"
        if "bypassing" in self._outputs:
            lines.append(f"store(x, bypassing, {at});")
        if spec.reader:
            lines.append(f"x = times(x, {self._beta()});")
        if spec.scales_values:
            lines.append(f"if (real) x = times(x, time_step(decays, batch, t, {self._head('v')}, 0));")
        return [*lines, f"store(x, v, {at});", *self._remembered("v")]

    def _gates(self) -> list[str]:
        """Decays and betas, by the SIMD-groups of the values."""
        spec, lines = self._spec, []
        HV, n = spec.value_heads, spec.substeps
        if "beta" in self._outputs:
            lines.append(f"if (lane == 0) beta[token * {n * HV} + vector] = {self._beta()};")
        if "g" in self._outputs:
            width = spec.state_dim if spec.decay == "channel" else 1
            head = "vector" if spec.decay_heads == HV else self._head("v")
            place = f"token * {HV} + vector, batch, t, {head}, real, lane"
            once = "" if n == 1 else f"if (vector < {HV}) "
            lines.append(f"{once}store_decays<{width}>(decays, g, {place});")
            if spec.slots:
                lines.append(f"store_lost<{width}>(decays, lost, {place});")
        return lines
