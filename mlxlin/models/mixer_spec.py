"""What the mixers of a model are, declared: plain frozen values, parts of `mlxlin.models.spec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["none", "silu"]
Gate = Literal["none", "silu", "sigmoid"]
Features = Literal["none", "silu", "silu_q", "relu", "elu", "hadamard", "hedgehog", "t2r", "dpfp"]
FIXED_DECAYS = ("retention", "geometric", "alibi")  # which do not depend on the input


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the first channels of each head.

    Attributes:
        dims: how many channels.
        base: of the frequencies.
        interleaved: neighbours are turned together (GPT-J order), else the two halves (NeoX order).
    """

    dims: int
    base: float = 10000.0
    interleaved: bool = False


@dataclass(frozen=True)
class NormSpec:
    """A normalisation over the last axis.

    Attributes:
        eps: added to the mean of squares.
        kind: rms divides by the root of the mean of squares; layer takes the mean away first.
        affine: with a learned gain (and bias, of kind layer).
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    affine: bool = True


@dataclass(frozen=True)
class DecaySpec:
    """How the log decay g comes from the layer's input x.

    softplus:   g = -exp(A_log) softplus(W x + dt_bias)              (Mamba-2, Gated DeltaNet, KDA)
    sigmoid:    g = bound sigmoid(exp(A_log) (W x + dt_bias))        (KDA with a lower bound; bound < 0)
    logsigmoid: g = max(logsigmoid(W x + b) / divisor, floor)        (GLA)
    forget:     g = log(b + (1 - b) sigmoid(W x)), k = 1 - exp(g)    (HGRN2)
    retention:  g = log(1 - 2^(-5-h))                                (RetNet)
    geometric:  g = -factor 2^(-8(h+1)/H)                            (Lightning attention in MiniMax)
    alibi:      the same, with ALiBi's slopes where H is no power of two (Lightning attention in Ring)

    Attributes:
        kind: one of these.
        vector: one value per key channel, else one per head.
        rank: W is W2 W1 of this rank; 0 for one matrix.
        bound: of sigmoid.
        divisor, floor: of logsigmoid; no floor where it is None.
        bounds: of forget, rows of the table that b is learned in, one per layer; without one (0) b is 0.
        layer: of forget, the row of this layer: b is its row of the table's softmax over layers, summed up to there
            without the first.
        factor: of geometric and alibi.
        scales_values: of softplus, whose factor softplus(W x + dt_bias) is a time step: v is multiplied by it.
        shortest, longest: of softplus, the time step is kept within them.
    """

    kind: Literal["softplus", "sigmoid", "logsigmoid", "forget", "retention", "geometric", "alibi"]
    vector: bool = False
    rank: int = 0
    bound: float = 0.0
    divisor: float = 1.0
    floor: float | None = None
    bounds: int = 0
    layer: int = 0
    factor: float = 1.0
    scales_values: bool = False
    shortest: float = 0.0
    longest: float | None = None


@dataclass(frozen=True)
class OutputSpec:
    """What happens between the recurrence and the output projection: a norm, and a gate beside it.

    Attributes:
        norm: None for none.
        gate: activation(W x), multiplied after the norm, or before it where `gate_first`.
        rank: W is W2 W1 of this rank; 0 for one matrix.
        bias: of the gate's (outer) matrix.
        joint: the norm runs over all heads together, else over each.
        groups: of a joint norm, that many equal parts.
    """

    norm: NormSpec | None
    gate: Gate = "none"
    gate_first: bool = False
    rank: int = 0
    bias: bool = False
    joint: bool = False
    groups: int = 1


@dataclass(frozen=True)
class LinearSpec:
    """A recurrent mixer of the linear-attention family.

    Attributes:
        rule: the recurrence's name in `mlxlin.recurrences`. Of comba, the state is read by p, in each head a learned
            fraction of k, and q is corrected by D p.
        heads, value_heads, key_dim, value_dim: H, HV, K, V.
        scale: factor on q.
        output: what happens behind the recurrence.
        kv_heads: heads of the k, v and decay projections, repeated to `heads`; 0 where there are as many.
        conv: taps of a depthwise causal convolution over the projected q, k and v, 0 for none.
        conv_bias: of that.
        qk_activation, v_activation: behind the convolution.
        features: map applied to q and k, or to q alone (silu_q); hadamard, hedgehog and t2r have weights.
        tied_features: q and k share those weights.
        simplex_q, simplex_k: divide by (sum + 1e-4).
        qk_norm: l2 (unit vectors), sum (sum of absolute values is one), rms (of each head, with a learned gain, before
            the rotation) or none.
        qk_eps: of rms.
        rope: rotation of q and k, None for none.
        decay: None for none.
        beta: factor on sigmoid(W x), or on one where `beta_projection` is off; None for rules without beta.
        steps: delta steps per token.
        normalize: the output is divided by the product of q and the sum of the keys.
        skip: D v is added to what the recurrence reads, with one D per head or per channel, v before its time step.
        in_bias, out_bias: of the projections of q, k, v and decay, and of the output's.
    """

    rule: Literal["linear", "decay", "gated", "delta", "gated_delta", "comba", "kda", "delta_product"]
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    scale: float
    output: OutputSpec
    kv_heads: int = 0
    conv: int = 0
    conv_bias: bool = False
    qk_activation: Activation = "none"
    v_activation: Activation = "none"
    features: Features = "none"
    tied_features: bool = False
    simplex_q: bool = False
    simplex_k: bool = False
    qk_norm: Literal["none", "l2", "sum", "rms"] = "none"
    qk_eps: float = 1e-6
    rope: RopeSpec | None = None
    decay: DecaySpec | None = None
    beta: float | None = None
    beta_projection: bool = True
    steps: int = 1
    normalize: bool = False
    skip: Literal["none", "head", "channel"] = "none"
    in_bias: bool = False
    out_bias: bool = False
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention with grouped key/value heads.

    Attributes:
        heads, kv_heads, head_dim: of the queries, of keys and values, and of all of them.
        scale: factor on q.
        rope: rotation of q and k, None for none.
        qk_norm: rms over each head, over the whole projected width, or none.
        eps: of that.
        gate: out * sigmoid(W x) before the output projection.
        qkv_bias, out_bias: of the projections.
        window: a query sees this many keys, itself included; None for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    qk_norm: Literal["none", "head", "full"] = "none"
    eps: float = 1e-6
    gate: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    kind: Literal["attention"] = "attention"


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention.

    Attributes:
        heads: of queries, keys and values.
        plain_dim, rotary_dim: parts of a head's query and key that come from the latent and that all heads share.
        value_dim: of a head.
        kv_rank: width of the latent.
        scale: factor on q.
        q_rank: width of the query's latent, 0 where queries are projected directly.
        rope: rotation of the shared part, None for none.
        eps: of the norms of the latents.
        gate: each head's output times a value of sigmoid(W x).
    """

    heads: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    kv_rank: int
    scale: float
    q_rank: int = 0
    rope: RopeSpec | None = None
    eps: float = 1e-6
    gate: bool = False
    kind: Literal["latent"] = "latent"


@dataclass(frozen=True)
class Rwkv7Spec:
    """RWKV-7's time mixing.

    Attributes:
        heads, head_dim: of all its vectors.
        decay_rank, rate_rank, value_rank, gate_rank: of its low-rank projections; value_rank is 0 in the layer whose
            values the others are drawn towards.
        eps: of the norm of each head.
        key_eps: added to the sum of squares of the keys that are taken out of the state.
    """

    heads: int
    head_dim: int
    decay_rank: int
    rate_rank: int
    value_rank: int
    gate_rank: int
    eps: float
    key_eps: float
    kind: Literal["rwkv7"] = "rwkv7"


@dataclass(frozen=True)
class Rwkv6Spec:
    """RWKV-6's time mixing.

    Attributes:
        heads, key_dim, value_dim: H, K, V.
        mix_rank, decay_rank: of its low-rank projections.
        eps: of the norm of each head.
    """

    heads: int
    key_dim: int
    value_dim: int
    mix_rank: int
    decay_rank: int
    eps: float
    kind: Literal["rwkv6"] = "rwkv6"


@dataclass(frozen=True)
class SlotSpec:
    """Softmax attention over a few memories that forget.

    Attributes:
        heads, key_dim, value_dim: H, K, V.
        kv_heads: heads of the k, v and forget projections, repeated to `heads`.
        slots: memories of each head.
        divisor: the log decay of a slot is logsigmoid(W x) / divisor.
        norm: of all heads together, behind silu.
        features: map applied to q and k.
        conv: taps of a depthwise causal convolution over the projected q, k and v with silu behind it, 0 for none.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    slots: int
    divisor: float
    norm: NormSpec
    features: Literal["silu", "relu"] = "silu"
    conv: int = 0
    kind: Literal["slots"] = "slots"


@dataclass(frozen=True)
class GatedConvSpec:
    """A short convolution between two gates, all from one projection.

    Attributes:
        taps: width of the convolution.
        bias: of convolution and projections.
    """

    taps: int
    bias: bool = False
    kind: Literal["gated_conv"] = "gated_conv"


MixerSpec = LinearSpec | AttentionSpec | LatentSpec | Rwkv7Spec | Rwkv6Spec | SlotSpec | GatedConvSpec
