"""Feature maps and normalisations of queries and keys, per head."""

from __future__ import annotations

from collections.abc import Callable

from mlxlin.backend import mx
from mlxlin.models.activations import silu
from mlxlin.models.blocks import Linear, Matrix
from mlxlin.models.params import Parameter, Params, Table
from mlxlin.models.spec import LinearSpec

Map = Callable[[mx.array], mx.array]

_DPFP_SHIFTS = 4


def elu_plus_one(x: mx.array) -> mx.array:
    """elu(x) + 1 (Katharopoulos et al. 2020)."""
    return mx.where(x > 0, x + 1, mx.exp(mx.minimum(x, 0)))


def dpfp(x: mx.array) -> mx.array:
    """Deterministic parameter-free projection, K -> 8 K (Schlag et al. 2021, nu = 4)."""
    both = mx.concatenate([mx.maximum(x, 0), mx.maximum(-x, 0)], axis=-1)
    return mx.concatenate([both * mx.roll(both, shift, -1) for shift in range(1, _DPFP_SHIFTS + 1)], axis=-1)


_PLAIN: dict[str, Map] = {
    "silu": silu,
    "relu": lambda x: mx.maximum(x, 0),
    "elu": elu_plus_one,
    "dpfp": dpfp,
}
_LAYERS = {"hadamard": ("layer1", "layer2"), "hedgehog": ("layer",), "t2r": ("layer",)}
_WIDENING = {"hedgehog": 2, "dpfp": 2 * _DPFP_SHIFTS}


def feature_dim(spec: LinearSpec) -> int:
    """K behind the feature map."""
    return spec.key_dim * _WIDENING.get(spec.features, 1)


def feature_parameters(spec: LinearSpec) -> Table:
    """Expected parameters of the maps of q and k."""
    table: Table = {}
    for side in ("q",) if spec.tied_features else ("q", "k"):
        for layer in _LAYERS.get(spec.features, ()):
            table[f"features_{side}.{layer}.weight"] = Parameter((spec.key_dim, spec.key_dim), "gate")
            if spec.features != "t2r":
                table[f"features_{side}.{layer}.bias"] = Parameter((spec.key_dim,), "keep")
    return table


def feature_maps(spec: LinearSpec, params: Params) -> tuple[Map | None, Map | None]:
    """The maps for q and for k, [..., K] -> [..., feature_dim]."""
    if spec.features == "none":
        return None, None
    if spec.features == "silu_q":
        return silu, lambda k: k
    if spec.features in _PLAIN:
        return _PLAIN[spec.features], _PLAIN[spec.features]
    q = _learned_map(spec.features, params.at("features_q"))
    return q, q if spec.tied_features else _learned_map(spec.features, params.at("features_k"))


def _learned_map(name: str, params: Params) -> Map:
    layers = [Linear(Matrix.take(params, layer)) for layer in _LAYERS[name]]
    if name == "hadamard":
        return lambda x: layers[0](x) * layers[1](x)
    if name == "t2r":
        return lambda x: mx.maximum(layers[0](x), 0)

    def hedgehog(x: mx.array) -> mx.array:
        y = 2 * layers[0](x)
        return mx.softmax(mx.concatenate([y, -y], axis=-1), axis=-1)

    return hedgehog


def simplex(x: mx.array) -> mx.array:
    """x / (sum x + 1e-4)."""
    return x / (x.sum(axis=-1, keepdims=True) + 1e-4)


def unit_sum(x: mx.array) -> mx.array:
    """x divided by the sum of its absolute values."""
    return x / mx.maximum(mx.abs(x).sum(axis=-1, keepdims=True), 1e-6)
