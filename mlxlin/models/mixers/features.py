"""Feature maps of queries and keys, per head: a matrix product where they are learned, and what follows it."""

from __future__ import annotations

from collections.abc import Callable

from mlxlin.backend import mx
from mlxlin.metal.mixer import Features
from mlxlin.models.activations import silu
from mlxlin.models.blocks import Linear, Matrix, joinable, joined
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import LinearSpec
from mlxlin.recurrences.features import mapped

Map = Callable[[mx.array], mx.array]

_LAYERS = {"hadamard": ("layer1", "layer2"), "hedgehog": ("layer",), "t2r": ("layer",)}
_WIDENING = {"hedgehog": 2, "dpfp": 8}
_KINDS: dict[str, Features] = {
    "none": "none",
    "silu": "silu",
    "silu_q": "none",
    "relu": "relu",
    "elu": "elu",
    "dpfp": "dpfp",
    "hadamard": "product",
    "hedgehog": "hedgehog",
    "t2r": "relu",
}


def feature_dim(spec: LinearSpec) -> int:
    """K behind the feature map."""
    return spec.key_dim * _WIDENING.get(spec.features, 1)


def learned(spec: LinearSpec) -> bool:
    """Whether the map begins with a matrix product."""
    return spec.features in _LAYERS


def kind_of(spec: LinearSpec) -> Features:
    """What the map does to q and k alike, behind its product, as `mlxlin.metal.mixer` calls it."""
    return _KINDS[spec.features]


def feature_parameters(spec: LinearSpec) -> Table:
    """Expected parameters of the maps of q and k."""
    table: Table = {}
    for side in ("q",) if spec.tied_features else ("q", "k"):
        for layer in _LAYERS.get(spec.features, ()):
            table[f"features_{side}.{layer}.weight"] = Parameter((spec.key_dim, spec.key_dim), "gate")
            if spec.features != "t2r":
                table[f"features_{side}.{layer}.bias"] = Parameter((spec.key_dim,), "keep")
    return table


def feature_products(spec: LinearSpec, params: Params) -> tuple[Map, Map] | None:
    """The products that learned maps of q and of k begin with, [..., K] -> [..., K], both of hadamard side by side."""
    if not learned(spec):
        return None
    q = _product(_LAYERS[spec.features], params.at("features_q"))
    return q, q if spec.tied_features else _product(_LAYERS[spec.features], params.at("features_k"))


def _product(layers: tuple[str, ...], params: Params) -> Map:
    matrices = [Matrix.take(params, layer) for layer in layers]
    if all(joinable(matrices[0], matrix) for matrix in matrices):
        return Linear(joined(matrices, params))
    products = [Linear(matrix) for matrix in matrices]
    return lambda x: mx.concatenate([product(x) for product in products], axis=-1)


def feature_maps(spec: LinearSpec) -> tuple[Map, Map]:
    """What follows, for q and for k, [..., n] -> [..., feature_dim]."""
    if spec.features == "silu_q":
        return silu, lambda k: k
    kind = kind_of(spec)
    both = silu if kind == "silu" else lambda x: mapped(kind, x)
    return both, both
