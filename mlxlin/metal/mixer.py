"""What a mixer does around its recurrence, as values that its kernels and their twin in plain operations share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import ClassVar, Literal

from mlxlin.backend import mx

Activation = Literal["none", "silu", "sigmoid", "relu", "elu", "silu_twice"]
Features = Literal[Activation, "dpfp", "product", "hedgehog"]
VectorNorm = Literal["none", "l2", "sum", "simplex", "rms"]
VECTOR_EPS = {"l2": 1e-6, "sum": 1e-6, "simplex": 1e-4}
LONGEST = 16


@dataclass(frozen=True)
class FusedSpec:
    """What a mixer does between its projections and its output projection.

    Attributes:
        heads, value_heads, key_dim, value_dim: H, HV, K, V.
        write, decay: the recurrence, as in `mlxlin.recurrences.RULES`.
        reader: a delta write that corrects what the state before the decay answers to p, a fraction of k; q is q - D p
            before both are made unit vectors (Comba). Needs norms of kind l2.
        substeps: sub-tokens per token; the projection holds q, then the keys of each, then the values of each.
        apart: q, k and v come apart, not side by side.
        repeats: value heads that share a projected head of k, v and decay; then there are as many query heads as value
            heads (grouped heads, each with a state of its own).
        taps: width of the short convolution over the projected channels, 0 for none.
        q_activation, k_activation, v_activation: behind the convolution; elu is elu(x) + 1, silu_twice silu of silu.
        features: map of each head's queries and keys behind that, to K features: an activation; dpfp of K / 8 channels
            (Schlag et al. 2021, nu = 4); product, of the halves of 2 K; hedgehog, the softmax of (2x, -2x) of K / 2.
        q_norm, k_norm: what each head's vector is divided by, behind the map: l2, sqrt(sum of squares + 1e-6); sum, the
            sum of absolute values, at least 1e-6; simplex, sum + 1e-4; rms, the root of the mean of squares + `qk_eps`,
            and then multiplied with a learned gain.
        rotary: leading channels of q and k that are turned by their position; `interleaved`: neighbours are a pair,
            else the two halves.
        scale: factor on q.
        decay_kind: how the log decay g comes from its projection x:
            given: g = x; softplus: rate dt, dt = softplus(x + bias) within `shortest` and `longest`, rate = -exp(A_log)
            (Mamba-2, Gated DeltaNet, KDA); sigmoid: constant sigmoid(rate (x + bias)), rate = exp(A_log) (KDA with a
            lower bound, RWKV-7); logsigmoid: max(logsigmoid(x) / constant, floor) (GLA); exponential: -exp(x) (RWKV-6);
            forget: log(b + (1 - b) sigmoid(x)), b = bias, and k = 1 - exp(g), not projected (HGRN2).
        scales_values: v is multiplied by the dt of softplus. skip: D v is added to the output, v before that.
        bonus: the state is read before the token decays and writes it; of the token's own v, q . (u k) is read, with a
            learned u (RWKV-6).
        beta: "none" where it is given, "sigmoid" where it is projected; times `beta_factor`.
        slots: gated slot attention over so many slots, M, each of a key and a value. A token is written into a slot as
            far as that lets go of what it holds, 1 - exp(g), with a g per slot; q reads how well it fits the keys, and
            a softmax of that reads the values. The values are S [B, HV, V, M], the keys `S_keys` [B, HV, M, K].
        normalize: y is divided by Z . q + this, Z the sum of the keys; None for not at all.
        norm: RMS norm of each head's output, or a layer norm where `centered`, with `eps`; or of `joint_groups` equal
            parts of all heads together, then a dispatch of its own. gate: activation of what the output is multiplied
            with after that, or before it where `gate_first` (of joint norms only); with the output itself where
            `self_gated`.
    """

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    write: Literal["add", "delta", "low_rank"]
    decay: Literal["none", "head", "channel"]
    reader: bool = False
    substeps: int = 1
    apart: bool = False
    repeats: int = 1
    taps: int = 0
    q_activation: Activation = "none"
    k_activation: Activation = "none"
    v_activation: Activation = "none"
    features: Features = "none"
    q_norm: VectorNorm = "none"
    k_norm: VectorNorm = "none"
    qk_eps: float = 0.0
    rotary: int = 0
    interleaved: bool = False
    scale: float = 1.0
    decay_kind: Literal["given", "softplus", "sigmoid", "logsigmoid", "exponential", "forget"] = "given"
    decay_constant: float = 1.0
    decay_floor: float = float("-inf")
    shortest: float = 0.0
    longest: float = float("inf")
    scales_values: bool = False
    skip: bool = False
    bonus: bool = False
    beta: Activation = "none"
    beta_factor: float = 1.0
    slots: int = 0
    normalize: float | None = None
    norm: bool = False
    centered: bool = False
    joint_groups: int = 0
    eps: float = 0.0
    gate: Activation = "none"
    gate_first: bool = False
    self_gated: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a specification is looked up several times for every layer of every token
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def state_dim(self) -> int:
        """Channels of a row of S, which a decay per channel has too."""
        return self.slots or self.key_dim

    @property
    def head_dim(self) -> int:
        """Projected channels of a head of queries or keys, before the feature map."""
        K = self.key_dim
        return {"dpfp": K // 8, "product": 2 * K, "hedgehog": K // 2}.get(self.features, K)

    @property
    def keys(self) -> int:
        """Projected channels of all keys of a token, of the decay where that makes them."""
        return self.substeps * self.heads * self.head_dim // self.repeats

    @property
    def width(self) -> int:
        """Channels of the convolution: q, keys, values; where the decay makes the keys its own, behind the values."""
        values = self.substeps * self.value_heads * self.value_dim // self.repeats
        return self.heads * self.head_dim + self.keys + values

    @property
    def convolves_decay(self) -> bool:
        """Whether the decay's projection has channels of the convolution."""
        return self.taps > 0 and self.decay_kind == "forget"

    @property
    def decay_heads(self) -> int:
        """Heads that the decay is projected to, or given for."""
        return self.value_heads if self.decay_kind == "given" else self.value_heads // self.repeats

    @property
    def starts(self) -> dict[str, int]:
        """The first channel of q, k and v where they are projected together."""
        queries = self.heads * self.head_dim
        return {"q": 0, "k": queries, "v": queries + (0 if self.decay_kind == "forget" else self.keys)}


@dataclass(frozen=True, eq=False)
class Projected:
    """What a mixer reads: projections of T tokens, parameters, state.

    Attributes:
        qkv: [B, T, width], or q, k and v apart (then without convolution), heads side by side in the last axis; without
            the keys where the decay makes them.
        S: float32 [B, HV, V, K], or the values of M slots [B, HV, V, M]. S_keys: float32 [B, HV, M, K], their keys.
        Z: float32 [B, HV, K] of a normalised recurrence.
        memory: the convolution's last taps - 1 raw inputs [B, taps - 1, width].
        weight, bias: of the convolution, [taps, width] and [width].
        q_gain, k_gain: [K] of rms vectors.
        decay: [B, T, HV] or [B, T, HV K], HV without repeats unless it is given; rate [HV] and decay_bias [HV] or
            [HV, K] belong to it.
        cos, sin: float32 [B, T, rotary / 2].
        reader: float32 [2, H], the fractions p / k and the corrections D.
        bonus: [H, K].
        skip: float32 [HV, V], or [HV, 1] for one number per head.
        beta: [B, T, n HV].
        a, b: [B, T, H K] of the low-rank write.
        gate: [B, T, HV V].
        norm, norm_bias: gain and, of a layer norm, bias, [V] for all heads or [HV V]; None for one and zero.
        lengths: real tokens of each row [B], None where all are.
    """

    qkv: mx.array | tuple[mx.array, ...]
    S: mx.array
    S_keys: mx.array | None = None
    Z: mx.array | None = None
    memory: mx.array | None = None
    weight: mx.array | None = None
    bias: mx.array | None = None
    q_gain: mx.array | None = None
    k_gain: mx.array | None = None
    decay: mx.array | None = None
    rate: mx.array | None = None
    decay_bias: mx.array | None = None
    cos: mx.array | None = None
    sin: mx.array | None = None
    reader: mx.array | None = None
    skip: mx.array | None = None
    bonus: mx.array | None = None
    beta: mx.array | None = None
    a: mx.array | None = None
    b: mx.array | None = None
    gate: mx.array | None = None
    norm: mx.array | None = None
    norm_bias: mx.array | None = None
    lengths: mx.array | None = None

    @property
    def first(self) -> mx.array:
        """A projection, for its batch, tokens and dtype."""
        return self.qkv[0] if isinstance(self.qkv, tuple) else self.qkv


@dataclass(frozen=True, eq=False)
class Tape:
    """What T tokens did to a state, float32: log decays g [B, T, HV(, K)], keys k [B, T n, H, K] (H without repeats)
    and writes u [B, T n, HV, V]; for the low-rank write the answers z [B, T, HV, V] and b [B, T, H, K] too. With
    slots, k [B, T, H, M] is what they let go of, and `keys` [B, T, H, K] are the tokens' own."""

    k: mx.array
    u: mx.array
    g: mx.array | None = None
    z: mx.array | None = None
    b: mx.array | None = None
    keys: mx.array | None = None


@dataclass(frozen=True, eq=False)
class Mixed:
    """Outputs of T tokens [B, T, HV, V], the states, the convolution's memory and, where asked for, the tape."""

    y: mx.array
    S: mx.array
    Z: mx.array | None = None
    memory: mx.array | None = None
    tape: Tape | None = None
    S_keys: mx.array | None = None


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
    step: int
    bonus: int
    fits: int
    lost: int
    size: int

    @classmethod
    def of(cls, spec: FusedSpec, rows: int) -> Record:
        K, n = spec.key_dim, spec.substeps
        low_rank = K if spec.write == "low_rank" else 0
        reader = K if spec.reader else low_rank
        sizes = [K, n * K, n * rows, {"none": 0, "head": 1, "channel": spec.state_dim}[spec.decay], reader, low_rank]
        sizes += [n if spec.write == "delta" else 0, 1 if spec.scales_values else 0, 1 if spec.bonus else 0]
        sizes += [spec.slots, spec.slots]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return cls(*ends)


@cache
def parts(spec: FusedSpec, batch: int) -> int:
    """Threadgroups per value head: more than one where there are too few heads to keep a GPU's memory busy."""
    n = 1
    while batch * spec.value_heads * n < 16 and spec.value_dim // (2 * n) >= 16 and spec.value_dim % (2 * n) == 0:
        n *= 2
    return n


def finishes(spec: FusedSpec, batch: int) -> bool:
    """Whether decode norms and gates its outputs; else that is a dispatch of its own."""
    return not spec.norm or (parts(spec, batch) == 1 and not spec.joint_groups)


@cache
def longest(spec: FusedSpec, batch: int) -> int:
    """The most tokens `decode` takes at once: what fits into threadgroup memory, at most 16."""
    return min(LONGEST, Record.FLOATS // Record.of(spec, spec.value_dim // parts(spec, batch)).size)
