"""What a model is, declared: plain frozen values that a decoder is built from and that mlxlin.json stores.

Every choice that changes the mathematics is a field here; nothing is read from a checkpoint's config after this.
Letters: D width, H key heads, HV value heads, K key dim, V value dim.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from mlxlin.errors import CheckpointError

FORMAT = 1

Activation = Literal["none", "silu"]
Gate = Literal["none", "silu", "sigmoid"]
Features = Literal["none", "silu", "silu_q", "relu", "elu", "hadamard", "hedgehog", "t2r", "dpfp"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the first `dims` of each head, in half-split (NeoX) order."""

    dims: int
    base: float = 10000.0


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

    `vector` gives one value per key channel, else one per head. W is W2 W1 of rank `rank` where rank > 0. `bounds` is
    the number of rows of the table that b is learned in, one per layer: b is row `layer` of the table's softmax over
    layers, summed up to there without the first; 0 where bounds = 0.
    """

    kind: Literal["softplus", "sigmoid", "logsigmoid", "retention", "forget"]
    vector: bool = False
    rank: int = 0
    divisor: float = 1.0
    floor: float | None = None
    bound: float = 0.0
    bounds: int = 0
    layer: int = 0


@dataclass(frozen=True)
class OutputSpec:
    """What happens between the recurrence and the output projection: a norm, and a gate beside it.

    joint: the norm runs over all heads together, else over each.
    gate: activation(W x) multiplied after the norm; W is W2 W1 of rank `rank` where rank > 0, `bias` on the outer one.
    """

    norm: NormSpec | None
    gate: Gate = "none"
    rank: int = 0
    bias: bool = False
    joint: bool = False


@dataclass(frozen=True)
class LinearSpec:
    """A recurrent mixer of the linear-attention family; `rule` is the name `mlxlin.recurrences.run` knows.

    conv: taps of a depthwise causal convolution over the projected q, k and v, 0 for none; the activations sit behind
        it. features: map applied to q and k, or to q alone (silu_q); with weights of their own for hadamard, hedgehog
        and t2r (shared by q and k where `tied_features`). qk_norm: l2 (unit vectors), sum (sum of absolute values is
        one) or none. simplex_q, simplex_k: divide by (sum + 1e-4). scale: factor on q. kv_heads: heads of the k, v and
        decay projections, repeated to `heads`. steps: delta steps per token. beta: factor on sigmoid(W x), or on one
        where `beta_projection` is off.
    """

    rule: Literal["linear", "decay", "gated", "delta", "gated_delta", "kda", "delta_product"]
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
    qk_norm: Literal["none", "l2", "sum"] = "none"
    rope: RopeSpec | None = None
    decay: DecaySpec | None = None
    beta: float | None = None
    beta_projection: bool = True
    steps: int = 1
    normalize: bool = False
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
class ChannelMixSpec:
    """RWKV-7's feed-forward, with a token shift before it: value(relu(key x)^2)."""

    hidden: int
    kind: Literal["channel_mix"] = "channel_mix"


@dataclass(frozen=True)
class MlpSpec:
    """Gated feed-forward, down(silu(gate x) * up x)."""

    hidden: int
    kind: Literal["mlp"] = "mlp"


@dataclass(frozen=True)
class LayerSpec:
    """One residual layer: x + mixer(norm x), then x + mlp(norm x); with `post_norm` the norms sit behind the parts."""

    mixer: LinearSpec | AttentionSpec | Rwkv7Spec
    mlp: MlpSpec | ChannelMixSpec
    norm: NormSpec
    post_norm: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder.

    Attributes:
        family: name of the family module that wrote this.
        context: tokens the model was trained for.
        tied: the head is the embedding.
        embed_norm: of the embedded tokens, before the first layer.
    """

    family: str
    vocab: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied: bool
    context: int
    embed_norm: NormSpec | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump; fields at their default are left out."""
        return {"format": FORMAT, **_dump(self)}

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
        spec = _load(cls, fields, "spec")
        assert isinstance(spec, cls)
        return spec


def _dump(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        kept = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        defaults = {f.name: f.default for f in dataclasses.fields(value)}
        return {name: _dump(v) for name, v in kept.items() if name == "kind" or v != defaults[name]}
    return [_dump(item) for item in value] if isinstance(value, tuple) else value


def _load(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _load_union(options, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise CheckpointError(f"{where} of the model description must be a list.")
        return tuple(_load(options[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Literal:
        fits = value in options
    elif dataclasses.is_dataclass(hint):
        return _load_dataclass(hint, value, where)
    else:
        fits = type(value) is hint or (hint is float and type(value) is int)
    if not fits:
        raise CheckpointError(f"{where} of the model description is {value!r}, expected {hint}.")
    return float(value) if hint is float else value


def _load_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    classes = [option for option in options if option is not type(None)]
    if isinstance(value, dict) and len(classes) > 1:
        classes = [option for option in classes if option.kind == value.get("kind")]
    if not classes:
        raise CheckpointError(f"{where} of the model description has unknown kind {value.get('kind')!r}.")
    return _load(classes[0], value, where)


def _load_dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} of the model description must be an object.")
    hints = typing.get_type_hints(cls)
    if unknown := sorted(set(value) - set(hints)):
        raise CheckpointError(f"{where} of the model description has an unknown field '{unknown[0]}'.")
    required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(value)):
        raise CheckpointError(f"{where} of the model description lacks '{missing[0]}'.")
    return cls(**{name: _load(hints[name], item, f"{where}.{name}") for name, item in value.items()})
