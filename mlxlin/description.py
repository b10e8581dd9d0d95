"""What a checkpoint is, without loading it: layers, sizes, state, and whether it fits this machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mlxlin.backend import compute_dtype, mx
from mlxlin.convert.outline import open_outline
from mlxlin.convert.recipe import Recipe, make_recipe
from mlxlin.convert.resolve import present
from mlxlin.loader import memory_plans, open_path, stored_dtype
from mlxlin.memory import available_bytes
from mlxlin.models import ModelSpec, QuantSpec, parameters
from mlxlin.models.decoder import Layer
from mlxlin.models.mixers.fused import decoding
from mlxlin.models.params import Params
from mlxlin.models.spec import LayerSpec, LinearSpec
from mlxlin.state import State


@dataclass(frozen=True)
class Description:
    """A model, described.

    Attributes:
        source: as it was asked for.
        path: where it lies; None for one on the hub.
        format: what it is stored as.
        spec: the declared model.
        dtype: what it would compute in here.
        layers: kind of mixer -> number of layers, e.g. {"gated_delta": 18, "attention": 6}.
        parameter_count: weights in all.
        stored_bytes: of the weights, as stored (or as `bits` would store them).
        memory_bytes: of the weights, once loaded on this machine.
        kinds: how the weights are stored -> bytes.
        state_bytes: of the recurrent state of one conversation, whatever its length.
        kv_bytes_per_token: what the attention layers add for each token.
        available_bytes: memory that is free here now.
        quantization: matrix -> how it is packed.
        dropped: (tensor, reason) of what is not used.
        notices: sentences a person should know.
    """

    source: str
    path: Path | None
    format: str
    spec: ModelSpec
    dtype: mx.Dtype
    layers: dict[str, int]
    parameter_count: int
    stored_bytes: int
    memory_bytes: int
    kinds: dict[str, int]
    state_bytes: int
    kv_bytes_per_token: int
    available_bytes: int
    quantization: dict[str, QuantSpec]
    dropped: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether weights and the state of an empty conversation fit into the free memory."""
        return self.memory_bytes + self.state_bytes <= self.available_bytes

    def bytes_at(self, context: int) -> int:
        """Weights and state after `context` tokens of one conversation."""
        return self.memory_bytes + self.state_bytes + context * self.kv_bytes_per_token

    @property
    def decoding(self) -> dict[str, int]:
        """What decodes the layers' mixers on Metal, between their projections -> number of layers."""
        mixers = (mixer for layer in self.spec.layers for mixer in (layer.mixer, layer.beside) if mixer is not None)
        return dict(Counter(map(decoding, mixers)))


def describe(
    source: str | Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    recipe: str | Path | Recipe | None = None,
    revision: str | None = None,
) -> Description:
    """Say what `source` is.

    Of a model on the hub only the config and the heads of the weight files are fetched; one that has been downloaded is
    described without any request.

    Args:
        source: as for `load`.
        bits, group_size, recipe: as if quantised while loading.
        revision: of a hub id.

    Raises:
        CheckpointError, UnsupportedError, HubError, InputError: as `load`.
    """
    path = present(source, revision)
    chosen = make_recipe(bits, group_size, None, recipe)
    prepared = open_outline(str(source), revision, chosen) if path is None else open_path(path, recipe=chosen)
    spec, dtype = prepared.spec, compute_dtype(stored_dtype(prepared))
    state_bytes, per_token = state_sizes(spec, dtype)
    room, plans = available_bytes(), memory_plans(prepared)
    kinds: Counter[str] = Counter()
    for item in prepared.items:
        kinds[item.form] += item.nbytes
    return Description(
        source=str(source),
        path=path,
        format=prepared.format,
        spec=spec,
        dtype=dtype,
        layers=dict(Counter(_kind(layer) for layer in spec.layers)),
        parameter_count=prepared.parameter_count,
        stored_bytes=prepared.nbytes,
        memory_bytes=next((p.nbytes for p in plans if p.nbytes <= room), plans[-1].nbytes),
        kinds=dict(kinds.most_common()),
        state_bytes=state_bytes,
        kv_bytes_per_token=per_token,
        available_bytes=room,
        quantization=prepared.quantization,
        dropped=prepared.dropped,
        notices=prepared.notices,
    )


def state_sizes(spec: ModelSpec, dtype: mx.Dtype) -> tuple[int, int]:
    """Bytes of the recurrent state of one conversation, and bytes per token of its keys and values.

    Layers are built over arrays that are never computed, so this costs no memory whatever the model's size.
    """
    blank = {name: mx.zeros(parameter.shape, dtype) for name, parameter in parameters(spec).items()}
    params = Params(blank, {})
    fresh = [
        Layer(layer, spec.width, params.at(f"layers.{index}"), dtype).fresh(1)
        for index, layer in enumerate(spec.layers)
    ]
    state = State(tuple(chain.from_iterable(fresh)), mx.zeros((1,), mx.int32))
    return state.recurrent_nbytes, sum(layer.row_nbytes for layer in state.keys_values())


def _kind(layer: LayerSpec) -> str:
    kind = layer.mixer.rule if isinstance(layer.mixer, LinearSpec) else layer.kind
    return kind if layer.beside is None else f"{kind} beside {layer.beside.kind}"
