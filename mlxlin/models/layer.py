"""One residual layer: a token mixer, then a feed-forward part, or one of the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxlin.backend import mx
from mlxlin.models.blocks import Mlp
from mlxlin.models.mixers.attention import Attention, attention_parameters
from mlxlin.models.mixers.gated_conv import GatedConv, gated_conv_parameters
from mlxlin.models.mixers.latent import LatentAttention, latent_parameters
from mlxlin.models.mixers.linear import LinearMixer, linear_parameters
from mlxlin.models.mixers.rwkv6 import Rwkv6, rwkv6_parameters
from mlxlin.models.mixers.rwkv7 import ChannelMix, Rwkv7, channel_mix_parameters, rwkv7_parameters
from mlxlin.models.mixers.slots import SlotMixer, slot_parameters
from mlxlin.models.mixers.step import Mixer, Step, recurrent
from mlxlin.models.moe import Moe, moe_parameters
from mlxlin.models.norms import Norm
from mlxlin.models.params import Params, Table, under
from mlxlin.models.residual import Residual
from mlxlin.models.spec import (
    AttentionSpec,
    BlendSpec,
    ChannelMixSpec,
    FeedForwardSpec,
    GatedConvSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    MoeSpec,
    Rwkv6Spec,
    Rwkv7Spec,
    SlotSpec,
)
from mlxlin.state import LayerState

# What a mixer's spec stands for: the parameters it expects, and the mixer itself.
_MIXERS: dict[type, tuple[Callable[[Any, int], Table], Callable[[Any, Params, int, mx.Dtype], Mixer]]] = {
    LinearSpec: (linear_parameters, LinearMixer),
    AttentionSpec: (attention_parameters, Attention),
    LatentSpec: (latent_parameters, LatentAttention),
    GatedConvSpec: (gated_conv_parameters, GatedConv),
    SlotSpec: (slot_parameters, SlotMixer),
    Rwkv6Spec: (rwkv6_parameters, Rwkv6),
    Rwkv7Spec: (rwkv7_parameters, Rwkv7),
}
_SHIFT = "mlp_shift"  # state of a feed-forward part with a token shift, beside its mixer's


def layer_parameters(layer: LayerSpec, width: int) -> Table:
    """Expected parameters of one layer in a model of this width."""
    table: Table = {}
    if layer.mixer is not None:
        table.update(under("mixer_norm", Norm.parameters(layer.norm, width)))
        table.update(under("mixer", _MIXERS[type(layer.mixer)][0](layer.mixer, width)))
    if layer.beside is not None:
        table.update(under("beside", attention_parameters(layer.beside, width)))
    if layer.mlp is not None:
        table.update(under("mlp_norm", Norm.parameters(layer.norm, width)))
        table.update(under("mlp", _feed_forward_parameters(layer.mlp, width)))
    return table


def _feed_forward_parameters(spec: FeedForwardSpec, width: int) -> Table:
    if isinstance(spec, MoeSpec):
        return moe_parameters(spec, width)
    return channel_mix_parameters(spec, width) if isinstance(spec, ChannelMixSpec) else Mlp.parameters(spec, width)


class Layer:
    """A mixer and a feed-forward part, each beside a residual path."""

    def __init__(self, spec: LayerSpec, width: int, params: Params, dtype: mx.Dtype) -> None:
        self._post_norm = spec.post_norm
        self._mixer_blend, self._mlp_blend = spec.mixer_blend, spec.mlp_blend
        self._mixer: Mixer | None = None
        self._beside = Attention(spec.beside, params.at("beside"), width, dtype) if spec.beside is not None else None
        self._mlp: Mlp | Moe | ChannelMix | None = None
        if spec.mixer is not None:
            self._mixer_norm = Norm(spec.norm, params.at("mixer_norm"))
            self._mixer = _MIXERS[type(spec.mixer)][1](spec.mixer, params.at("mixer"), width, dtype)
        if spec.mlp is not None:
            self._mlp_norm = Norm(spec.norm, params.at("mlp_norm"))
            self._mlp = _feed_forward(spec.mlp, width, params.at("mlp"), dtype)

    @property
    def parts(self) -> int:
        """Entries of its state: two where there is a second mixer."""
        return 1 if self._beside is None else 2

    def fresh(self, batch: int) -> tuple[LayerState, ...]:
        """The state before the first token, an entry for each mixer."""
        state = {} if self._mixer is None else self._mixer.fresh(batch)
        if isinstance(self._mlp, ChannelMix):
            state = {**recurrent(state), _SHIFT: self._mlp.fresh(batch)}
        return (state,) if self._beside is None else (state, self._beside.fresh(batch))

    def __call__(
        self, x: Residual, states: tuple[LayerState, ...], step: Step
    ) -> tuple[Residual, tuple[LayerState, ...]]:
        """The sum before this layer -> the sum behind it and the layer's new state."""
        state, *others = states
        new = state
        if self._mixer is not None:
            read, x = self._read(x, self._mixer_norm, self._mixer_blend)
            mixed, new = self._mixer(read, state, step)
            if self._beside is not None:
                more, others[0] = self._beside(read, others[0], step)
                mixed = mixed + more
            x = self._write(x, mixed, self._mixer_norm, self._mixer_blend)
        if self._mlp is not None:
            read, x = self._read(x, self._mlp_norm, self._mlp_blend)
            mixed, new = _fed_forward(self._mlp, read, state, new, step)
            x = self._write(x, mixed, self._mlp_norm, self._mlp_blend)
        return x, (new, *others)

    def _read(self, x: Residual, norm: Norm, blend: BlendSpec | None) -> tuple[mx.array, Residual]:
        if self._post_norm:
            return x.total, x
        normed, x = x.normed(norm)
        return normed, x if blend is None or blend.kept is None else Residual(normed * blend.kept)

    def _write(self, x: Residual, mixed: mx.array, norm: Norm, blend: BlendSpec | None) -> Residual:
        mixed = mixed if blend is None else mixed * blend.added
        return x.plus(norm(mixed) if self._post_norm else mixed)


def _fed_forward(
    mlp: Mlp | Moe | ChannelMix, x: mx.array, old: LayerState, new: LayerState, step: Step
) -> tuple[mx.array, LayerState]:
    """The feed-forward part of x, and `new` with what it remembers."""
    if not isinstance(mlp, ChannelMix):
        return mlp(x), new
    y, last = mlp(x, recurrent(old)[_SHIFT], step)
    return y, {**recurrent(new), _SHIFT: last}


def _feed_forward(spec: FeedForwardSpec, width: int, params: Params, dtype: mx.Dtype) -> Mlp | Moe | ChannelMix:
    if isinstance(spec, MoeSpec):
        return Moe(spec, params)
    return ChannelMix(spec, params, width, dtype) if isinstance(spec, ChannelMixSpec) else Mlp(spec, params)
