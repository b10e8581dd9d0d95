"""What a mixer does around its recurrence, as values that its kernels and their twin in plain operations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mlxlin.backend import mx

Activation = Literal["none", "silu", "sigmoid"]
LONGEST = 16


@dataclass(frozen=True)
class FusedSpec:
    """What a mixer does between its projections and its output projection.

    Attributes:
        heads, value_heads, key_dim, value_dim: H, HV, K, V.
        write, decay: the recurrence, as in `mlxlin.recurrences.RULES`.
        substeps: sub-tokens per token; the projection holds q, then the keys of each, then the values of each.
        taps: width of the short convolution over the projected channels, 0 for none.
        qk_activation, v_activation: behind the convolution.
        unit: q and k are divided by sqrt(sum of squares + 1e-6).
        scale: factor on q.
        decay_kind: how the log decay g comes from its projection x:
            given: g = x; softplus: rate softplus(x + bias), rate = -exp(A_log) (Gated DeltaNet, KDA);
            sigmoid: constant sigmoid(rate (x + bias)), rate = exp(A_log) (KDA with a lower bound);
            logsigmoid: max(logsigmoid(x) / constant, floor) (GLA).
        beta: "none" where it is given, "sigmoid" where it is projected; times `beta_factor`.
        norm: RMS norm of each head's output, with `eps`; gate: activation of what it is multiplied with after that.
    """

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    write: Literal["add", "delta", "low_rank"]
    decay: Literal["none", "head", "channel"]
    substeps: int = 1
    taps: int = 0
    qk_activation: Activation = "none"
    v_activation: Activation = "none"
    unit: bool = False
    scale: float = 1.0
    decay_kind: Literal["given", "softplus", "sigmoid", "logsigmoid"] = "given"
    decay_constant: float = 1.0
    decay_floor: float = float("-inf")
    beta: Activation = "none"
    beta_factor: float = 1.0
    norm: bool = False
    eps: float = 0.0
    gate: Activation = "none"

    @property
    def width(self) -> int:
        """Projected channels: q, keys, values."""
        n = self.substeps
        return self.heads * self.key_dim * (1 + n) + self.value_heads * self.value_dim * n


@dataclass(frozen=True, eq=False)
class Projected:
    """What a mixer reads: projections of T tokens, parameters, state.

    Attributes:
        qkv: [B, T, width], or q, k and v apart (then without convolution), heads side by side in the last axis.
        S: float32 [B, HV, V, K].
        memory: the convolution's last taps - 1 raw inputs [B, taps - 1, width].
        weight, bias: of the convolution, [taps, width] and [width].
        decay: [B, T, HV] or [B, T, HV K]; rate [HV] and decay_bias [HV] or [HV, K] belong to it.
        beta: [B, T, n HV].
        a, b: [B, T, H K] of the low-rank write.
        gate: [B, T, HV V].
        norm: [V].
        lengths: real tokens of each row [B], None where all are.
    """

    qkv: mx.array | tuple[mx.array, mx.array, mx.array]
    S: mx.array
    memory: mx.array | None = None
    weight: mx.array | None = None
    bias: mx.array | None = None
    decay: mx.array | None = None
    rate: mx.array | None = None
    decay_bias: mx.array | None = None
    beta: mx.array | None = None
    a: mx.array | None = None
    b: mx.array | None = None
    gate: mx.array | None = None
    norm: mx.array | None = None
    lengths: mx.array | None = None

    @property
    def streams(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.qkv if isinstance(self.qkv, tuple) else (self.qkv, self.qkv, self.qkv)


@dataclass(frozen=True, eq=False)
class Tape:
    """What T tokens did to a state, float32: log decays g [B, T, HV(, K)], keys k [B, T n, H, K] and writes
    u [B, T n, HV, V]; for the low-rank write also the answers z [B, T, HV, V] and b [B, T, H, K]."""

    k: mx.array
    u: mx.array
    g: mx.array | None = None
    z: mx.array | None = None
    b: mx.array | None = None


@dataclass(frozen=True, eq=False)
class Mixed:
    """Outputs of T tokens [B, T, HV, V], the state, the convolution's memory and, where asked for, the tape."""

    y: mx.array
    S: mx.array
    memory: mx.array | None = None
    tape: Tape | None = None


@dataclass(frozen=True)
class Record:
    """Where threadgroup memory holds what of one token, in floats."""

    FLOATS: ClassVar[int] = 8192  # of threadgroup memory

    keys: int
    values: int
    decays: int
    a: int
    b: int
    betas: int
    size: int

    @classmethod
    def of(cls, spec: FusedSpec, rows: int) -> Record:
        K, n = spec.key_dim, spec.substeps
        low_rank = K if spec.write == "low_rank" else 0
        sizes = [K, n * K, n * rows, {"none": 0, "head": 1, "channel": K}[spec.decay], low_rank, low_rank]
        sizes.append(n if spec.write == "delta" else 0)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return cls(*ends)


def parts(spec: FusedSpec, batch: int) -> int:
    """Threadgroups per value head: more than one where there are too few heads to keep a GPU's memory busy."""
    n = 1
    while batch * spec.value_heads * n < 16 and spec.value_dim // (2 * n) >= 16 and spec.value_dim % (2 * n) == 0:
        n *= 2
    return n


def longest(spec: FusedSpec, batch: int) -> int:
    """The most tokens `decode` takes at once: what fits into threadgroup memory, at most 16."""
    return min(LONGEST, Record.FLOATS // Record.of(spec, spec.value_dim // parts(spec, batch)).size)
