"""What a model is, declared: plain frozen values that a decoder is built from and that mlxlin.json stores.

Every choice that changes the mathematics is a field here; nothing is read from a checkpoint's config after this.
Letters: D width, H key heads, HV value heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlxlin.errors import CheckpointError
from mlxlin.models.declaration import dump, load

FORMAT = 1

Activation = Literal["none", "silu"]
Gate = Literal["none", "silu", "sigmoid"]
Features = Literal["none", "silu", "silu_q", "relu", "elu", "hadamard", "hedgehog", "t2r", "dpfp"]
FIXED_DECAYS = ("retention", "geometric", "alibi")  # which do not depend on the input


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the first `dims` of each head.

    interleaved: neighbours are turned together (GPT-J order), else the two halves (NeoX order).
    """

    dims: int
    base: float = 10000.0
    interleaved: bool = False


@dataclass(frozen=True)
class NormSpec:
    """A normalisation over the last axis."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    affine: bool = True


@dataclass(frozen=True)
class DecaySpec:
    """How the log decay g comes from the layer's input x.

    softplus:   g = -exp(A_log) softplus(W x + dt_bias)              (Mamba-2, Gated DeltaNet, KDA)
    sigmoid:    g = bound sigmoid(exp(A_log) (W x + dt_bias))        (KDA with a lower bound; bound < 0)
    logsigmoid: g = max(logsigmoid(W x + b) / divisor, floor)        (GLA)
    retention:  g = log(1 - 2^(-5-h))                                (RetNet)
    forget:     g = log(b + (1 - b) sigmoid(W x)), k = 1 - exp(g)    (HGRN2)
    geometric:  g = -factor 2^(-8(h+1)/H)                            (Lightning attention in MiniMax)
    alibi:      the same, with ALiBi's slopes where H is no power of two (Lightning attention in Ring)

    `vector` gives one value per key channel, else one per head. W is W2 W1 of rank `rank` where rank > 0. `bounds` is
    the number of rows of the table that b is learned in, one per layer: b is row `layer` of the table's softmax over
    layers, summed up to there without the first; 0 where bounds = 0.

    Of softplus, the factor softplus(W x + dt_bias) is a time step: it is kept within `shortest` and `longest`, and v is
    multiplied by it where `scales_values`.
    """

    kind: Literal["softplus", "sigmoid", "logsigmoid", "retention", "forget", "geometric", "alibi"]
    vector: bool = False
    rank: int = 0
    divisor: float = 1.0
    floor: float | None = None
    bound: float = 0.0
    bounds: int = 0
    layer: int = 0
    scales_values: bool = False
    shortest: float = 0.0
    longest: float | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class OutputSpec:
    """What happens between the recurrence and the output projection: a norm, and a gate beside it.

    joint: the norm runs over all heads together, in `groups` equal parts, else over each.
    gate: activation(W x) multiplied after the norm, or before it where `gate_first`; W is W2 W1 of rank `rank` where
        rank > 0, `bias` on the outer one.
    """

    norm: NormSpec | None
    gate: Gate = "none"
    rank: int = 0
    bias: bool = False
    joint: bool = False
    groups: int = 1
    gate_first: bool = False


@dataclass(frozen=True)
class LinearSpec:
    """A recurrent mixer of the linear-attention family; `rule` is the name `mlxlin.recurrences.run` knows.

    conv: taps of a depthwise causal convolution over the projected q, k and v, 0 for none; the activations sit behind
        it. features: map applied to q and k, or to q alone (silu_q); with weights of their own for hadamard, hedgehog
        and t2r (shared by q and k where `tied_features`). qk_norm: l2 (unit vectors), sum (sum of absolute values is
        one), rms (of each head, with a learned gain and `qk_eps`, before the rotation) or none. simplex_q, simplex_k:
        divide by (sum + 1e-4). scale: factor on q. kv_heads: heads of the k, v and decay projections, repeated to
        `heads`. steps: delta steps per token. beta: factor on sigmoid(W x), or on one where `beta_projection` is off.
        skip: D v is added to what the recurrence reads, with one D per head or per channel, v before its time step.
        in_bias, out_bias: of the projections of q, k, v and decay, of the output's.

    With the rule comba the state is read by p, in each head a learned fraction of k, and q is corrected by D p.
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

    qk_norm: rms over each head, over the whole projected width, or none. gate: out * sigmoid(W x) before the output
    projection. window: a query sees this many keys, itself included.
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
    """Multi-head latent attention; without `rope` the shared part of the keys is not turned.

    plain_dim, rotary_dim: parts of a head's query and key that come from the latent and that all heads share.
    kv_rank: width of the latent. q_rank: of the query's, 0 where queries are projected directly. gate: each head's
    output times a value of sigmoid(W x).
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
    """RWKV-7's time mixing. Ranks are those of its low-rank projections.

    value_rank: 0 in the layer whose values the others are drawn towards. eps: of the norm of each head. key_eps: added
    to the sum of squares of the keys that are taken out of the state.
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
    """RWKV-6's time mixing; mix_rank, decay_rank: of its low-rank projections; eps: of the norm of each head."""

    heads: int
    key_dim: int
    value_dim: int
    mix_rank: int
    decay_rank: int
    eps: float
    kind: Literal["rwkv6"] = "rwkv6"


@dataclass(frozen=True)
class SlotSpec:
    """Attention over `slots` memories that forget, by logsigmoid(W x) / divisor.

    features: map applied to q and k. conv: taps of a depthwise causal convolution over the projected q, k and v with
    silu behind it, 0 for none. kv_heads: heads of the k, v and forget projections, repeated to `heads`. norm: of all
    heads together, behind silu.
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
    """A short convolution between two gates, all from one projection; bias: of convolution and projections."""

    taps: int
    bias: bool = False
    kind: Literal["gated_conv"] = "gated_conv"


@dataclass(frozen=True)
class ChannelMixSpec:
    """RWKV's feed-forward, with a token shift before it: value(relu(key x)^2), in RWKV-6 times sigmoid(gate x)."""

    hidden: int
    gated: bool = False
    kind: Literal["channel_mix"] = "channel_mix"


@dataclass(frozen=True)
class MlpSpec:
    """Feed-forward: down(silu(gate x) * up x), or down(relu(up x)^2). bias: of all its projections."""

    hidden: int
    form: Literal["swiglu", "relu2"] = "swiglu"
    bias: bool = False
    kind: Literal["mlp"] = "mlp"


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts, each a feed-forward of width `hidden`, `active` of them for each token.

    score: what router logits become. correction: a learned bias on the scores that only counts in the choice. groups,
    groups_kept: only experts of the groups with the largest two best scores are chosen. normalized: weights are divided
    by their sum + `sum_eps`, then times `factor`. shared: width of a feed-forward for all tokens, 0 for none;
    shared_gate: times sigmoid(W x). exact_router: logits are computed in float32 whatever the dtype of the model.
    form: of all experts, as in MlpSpec. latent: width of a projection of x that the experts work on, whose sum is
    projected back; 0 for x itself. bias: of the shared part and the latent projections.
    """

    experts: int
    active: int
    hidden: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    groups_kept: int = 1
    normalized: bool = True
    sum_eps: float = 1e-20
    factor: float = 1.0
    shared: int = 0
    shared_gate: bool = False
    exact_router: bool = False
    form: Literal["swiglu", "relu2"] = "swiglu"
    latent: int = 0
    bias: bool = False
    kind: Literal["moe"] = "moe"

    @property
    def shared_part(self) -> MlpSpec | None:
        """The feed-forward for all tokens."""
        return MlpSpec(self.shared, self.form, self.bias) if self.shared else None


MixerSpec = LinearSpec | AttentionSpec | LatentSpec | Rwkv7Spec | GatedConvSpec | SlotSpec | Rwkv6Spec
FeedForwardSpec = MlpSpec | MoeSpec | ChannelMixSpec


@dataclass(frozen=True)
class BlendSpec:
    """Another residual path: x + added part(norm x); where there is `kept`, kept norm(x) + added part(norm x)."""

    kept: float | None
    added: float


@dataclass(frozen=True)
class FoldedSpec:
    """Factors that are multiplied into a parameter when a checkpoint is read: one, or one for each of q, k and v."""

    parameter: str
    factors: tuple[float, ...]


@dataclass(frozen=True)
class LayerSpec:
    """One residual layer: x + mixer(norm x), then x + mlp(norm x); with `post_norm` the norms sit behind the parts.

    Either part may be missing, with its norm. mixer_blend, mlp_blend: another residual path beside that part. beside: a
    second mixer of the same input, whose output is added to the first's. folded: what the parameters hold beside the
    checkpoint's numbers; nothing is left of it to compute.
    """

    mixer: MixerSpec | None
    mlp: FeedForwardSpec | None
    norm: NormSpec
    post_norm: bool = False
    mixer_blend: BlendSpec | None = None
    mlp_blend: BlendSpec | None = None
    beside: AttentionSpec | None = None
    folded: tuple[FoldedSpec, ...] = ()

    @property
    def kind(self) -> str:
        """Kind of the mixer; of the feed-forward part where there is no mixer."""
        part = self.mixer or self.mlp
        assert part is not None
        return part.kind


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder.

    Attributes:
        family: name of the family module that wrote this.
        context: tokens the model was trained for.
        tied: the head is the embedding.
        embed_norm: of the embedded tokens, before the first layer.
        embed_factor: on the embedded tokens.
        logit_factor: on the logits.
    """

    family: str
    vocab: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied: bool
    context: int
    embed_norm: NormSpec | None = None
    embed_factor: float = 1.0
    logit_factor: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump; fields at their default are left out."""
        return {"format": FORMAT, **dump(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """Read `to_json` back.

        Raises:
            CheckpointError: another format number, an unknown or missing field, or a value of the wrong kind.
        """
        fields = dict(data)
        if fields.pop("format", None) != FORMAT:
            raise CheckpointError(
                f"The model description has format {data.get('format')!r}; this mlxlin reads format {FORMAT}.",
                hint="Convert the checkpoint again with this version.",
            )
        spec = load(cls, fields, "spec")
        assert isinstance(spec, cls)
        return spec
