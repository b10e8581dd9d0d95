"""What a model is, declared: plain frozen values that a decoder is built from and that mlxlin.json stores.

Every choice that changes the mathematics is a field here; nothing is read from a checkpoint's config after this.
Letters: D width, H key heads, HV value heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlxlin.errors import CheckpointError
from mlxlin.models.declaration import dump, load
from mlxlin.models.mixer_spec import (
    FIXED_DECAYS,
    Activation,
    AttentionSpec,
    DecaySpec,
    Features,
    Gate,
    GatedConvSpec,
    LatentSpec,
    LinearSpec,
    MixerSpec,
    NormSpec,
    OutputSpec,
    RopeSpec,
    Rwkv6Spec,
    Rwkv7Spec,
    SlotSpec,
)

FORMAT = 1


@dataclass(frozen=True)
class ChannelMixSpec:
    """RWKV's feed-forward, with a token shift before it: value(relu(key x)^2).

    Attributes:
        hidden: width of the key.
        gated: times sigmoid(gate x), as in RWKV-6.
    """

    hidden: int
    gated: bool = False
    kind: Literal["channel_mix"] = "channel_mix"


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward part.

    Attributes:
        hidden: its width.
        form: swiglu for down(silu(gate x) * up x), relu2 for down(relu(up x)^2).
        bias: of all its projections.
    """

    hidden: int
    form: Literal["swiglu", "relu2"] = "swiglu"
    bias: bool = False
    kind: Literal["mlp"] = "mlp"


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts, each a feed-forward part.

    Attributes:
        experts, active: how many there are, and how many work on a token.
        hidden: width of each.
        form: as in MlpSpec, of all experts.
        score: what router logits become.
        exact_router: the logits are computed in float32 whatever the dtype of the model.
        correction: a learned bias on the scores that only counts in the choice.
        groups, groups_kept: only experts of the groups with the largest two best scores are chosen.
        normalized: weights are divided by their sum + `sum_eps`.
        factor: on the weights, after that.
        latent: width of a projection of x that the experts work on, whose sum is projected back; 0 for x itself.
        shared: width of a feed-forward part for all tokens, 0 for none.
        shared_gate: that part times sigmoid(W x).
        bias: of the shared part and the latent projections.
    """

    experts: int
    active: int
    hidden: int
    form: Literal["swiglu", "relu2"] = "swiglu"
    score: Literal["softmax", "sigmoid"] = "softmax"
    exact_router: bool = False
    correction: bool = False
    groups: int = 1
    groups_kept: int = 1
    normalized: bool = True
    sum_eps: float = 1e-20
    factor: float = 1.0
    latent: int = 0
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    kind: Literal["moe"] = "moe"

    @property
    def shared_part(self) -> MlpSpec | None:
        """The feed-forward for all tokens."""
        return MlpSpec(self.shared, self.form, self.bias) if self.shared else None


FeedForwardSpec = MlpSpec | MoeSpec | ChannelMixSpec


@dataclass(frozen=True)
class BlendSpec:
    """Another residual path: kept + added part(norm x).

    Attributes:
        kept: what is kept is this factor times norm(x); None for x itself.
        added: factor on what the part adds.
    """

    kept: float | None
    added: float


@dataclass(frozen=True)
class FoldedSpec:
    """Factors that are multiplied into a parameter when a checkpoint is read.

    Attributes:
        parameter: its name in the layer.
        factors: one, or one for each of q, k and v.
    """

    parameter: str
    factors: tuple[float, ...]


@dataclass(frozen=True)
class LayerSpec:
    """One residual layer: x + mixer(norm x), then x + mlp(norm x).

    Attributes:
        mixer, mlp: its parts; one may be missing, with its norm.
        norm: before each part, or behind it where `post_norm`.
        mixer_blend, mlp_blend: another residual path beside that part.
        beside: a second mixer of the same input, whose output is added to the first's.
        folded: what the parameters hold beside the checkpoint's numbers; nothing is left of it to compute.
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
        vocab: tokens it knows.
        width: D.
        layers: from the first to the last.
        norm: behind the last layer.
        tied: the head is the embedding.
        context: tokens the model was trained for.
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


__all__ = [
    "FIXED_DECAYS",
    "FORMAT",
    "Activation",
    "AttentionSpec",
    "BlendSpec",
    "ChannelMixSpec",
    "DecaySpec",
    "Features",
    "FeedForwardSpec",
    "FoldedSpec",
    "Gate",
    "GatedConvSpec",
    "LatentSpec",
    "LayerSpec",
    "LinearSpec",
    "MixerSpec",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "NormSpec",
    "OutputSpec",
    "RopeSpec",
    "Rwkv6Spec",
    "Rwkv7Spec",
    "SlotSpec",
]
