"""Launcher of `prefill`: what a mixer does between its projections and its recurrence, for any number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlin.backend import mx

from .decode import ACTIVATION, gates, inputs
from .kernels import Outputs, launch, literal, view
from .mixer import FusedSpec, Projected


@dataclass(frozen=True, eq=False)
class Prepared:
    """The arguments of a recurrence: q [B, T, H, K], k [B, T n, H, K], v [B, T n, HV, V] in the dtype of the
    projections; g [B, T, HV(, K)] and beta [B, T n, HV] in float32; and the convolution's memory."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array | None = None
    beta: mx.array | None = None
    memory: mx.array | None = None


def prefill(spec: FusedSpec, x: Projected) -> Prepared:
    """Convolution, activations, unit norm and gates in one dispatch; zeros past the last real token of each row."""
    assert not isinstance(x.qkv, tuple)
    B, T, _ = x.qkv.shape
    H, HV, K, V, n, dtype = (spec.heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.substeps, x.qkv.dtype)
    outputs: Outputs = {
        "q": ((B, T, H, K), dtype),
        "k": ((B, T * n, H, K), dtype),
        "v": ((B, T * n, HV, V), dtype),
    }
    if spec.decay != "none":
        outputs["g"] = ((B, T, HV, *([K] if spec.decay == "channel" else [])), mx.float32)
    if spec.write == "delta":
        outputs["beta"] = ((B, T * n, HV), mx.float32)
    if spec.taps:
        outputs["memory"] = ((B, spec.taps - 1, spec.width), dtype)
    read = ("qkv", "memory", "weight", "bias", "decay", "rate", "decay_bias", "beta", "lengths")
    arrays = {f"{name}_in": array for name, array in inputs(spec, x).items() if name in read}
    results = launch(
        "prefill",
        ["mixer", "prefill"],
        "\n".join(_body(spec, arrays, outputs)),
        {**arrays, "T": T},
        outputs,
        (32, H * (1 + n) + HV * n, B * T),
        (32, 8, 1),
    )
    return Prepared(**dict(zip(outputs, results, strict=True)))


def _body(spec: FusedSpec, arrays: dict[str, mx.array | None], outputs: Outputs) -> list[str]:
    """The SIMD-groups of queries, keys and values, one branch each."""
    H, HV, K, V, n = spec.heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.substeps

    def seen(*names: str) -> str:
        return ", ".join(view(f"{name}_in", arrays.get(f"{name}_in") is not None) for name in names)

    channels = f"channels<{spec.taps}>({seen('qkv', 'memory', 'weight', 'bias')})"

    def branch(out: str, heads: int, size: int, first: int, activation: str, unit: bool, scale: float) -> list[str]:
        kind = f"{size}, {ACTIVATION[activation]}, {str(unit).lower()}"
        c0 = f"{first} + vector * {size}"
        lines = [
            f"prefill_vector<{kind}>({channels}, {c0}, {literal(scale)}, {out}, token * {heads} + vector, "
            "b, t, real, lane);"
        ]
        if spec.taps:
            last = f"remember({channels}, memory, b, n, {spec.width}, {c0} + lane, {c0} + {size}, 32);"
            lines.append(f"if (t == 0) {last}")
        return lines

    keys = H * K
    lines = [
        "const int b = thread_position_in_grid.z / T, t = thread_position_in_grid.z % T;",
        "const int lane = thread_index_in_simdgroup;",
        f"const int n = real_tokens({seen('lengths')}, b, T);",
        "const int64_t token = int64_t(b) * T + t;",
        "const bool real = t < n;",
        "int vector = thread_position_in_grid.y;",
        f"if (vector < {H}) {{",
        *branch("q", H, K, 0, spec.q_activation, spec.q_norm == "l2", spec.scale),
        f"}} else if (vector < {H * (1 + n)}) {{",
        f"vector -= {H};",
        *branch("k", n * H, K, keys, spec.k_activation, spec.k_norm == "l2", 1.0),
        "} else {",
        f"vector -= {H * (1 + n)};",
        *branch("v", n * HV, V, keys * (1 + n), spec.v_activation, False, 1.0),
    ]
    if "beta" in outputs:
        beta = f"activated<{ACTIVATION[spec.beta]}>(load(row({seen('beta')}, b, t, 0), vector))"
        lines.append(
            f"if (lane == 0) beta[token * {n * HV} + vector] = real ? {literal(spec.beta_factor)} * {beta} : 0.0f;"
        )
    if "g" in outputs:
        width = K if spec.decay == "channel" else 1
        lines.append(
            f"if (vector < {HV}) prefill_decay<{width}>({gates(spec, seen)}, g, token * {HV} + vector, b, t, "
            "vector, real, lane);"
        )
    return [*lines, "}"]
