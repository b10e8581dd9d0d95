"""Linear attention with feature maps in flash-linear-attention's layout (Katharopoulos et al. 2020)."""

from __future__ import annotations

import dataclasses

from mlxlin.models import fla_layout
from mlxlin.models.config import Config, given, only
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.mixers.features import feature_dim
from mlxlin.models.rules import Weight
from mlxlin.models.spec import Features, LinearSpec, ModelSpec, NormSpec, OutputSpec

SERVES = (("linear_attn", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    *(
        Weight(MIXER + f"features_{side}.{part}", ATTN + f"feature_map_{side}.{part}", copy=copy and copy + part)
        for side, copy in (("q", ATTN + "feature_map_k."), ("k", ""))
        for part in ("layer.weight", "layer.bias", "layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias")
    ),
    Weight(MIXER + "norm.weight", ATTN + "norm.weight"),
)
_FEATURES: dict[str, Features] = {"elementwise_product": "hadamard", "identity": "none"}


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    name = given(config, "feature_map", "elementwise_product")
    only(config, {"feature_map": ("elementwise_product", "hedgehog", "t2r", "dpfp", "elu", "relu", "identity")})
    heads = given(config, "num_heads", 4)
    norm = NormSpec(fla_layout.eps(config), affine=given(config, "elementwise_affine", True))
    mixer = LinearSpec(
        rule="linear",
        heads=heads,
        value_heads=heads,
        key_dim=fla_layout.width_times(config, given(config, "expand_k", 1.0), heads, "expand_k"),
        value_dim=fla_layout.width_times(config, given(config, "expand_v", 1.0), heads, "expand_v"),
        scale=1.0,
        output=OutputSpec(norm),
        kv_heads=given(config, "num_kv_heads", heads),
        features=_FEATURES.get(name, name),
        tied_features=given(config, "tie_feature_map_qk", False),
        simplex_q=given(config, "norm_q", False),
        simplex_k=given(config, "norm_k", False),
        normalize=given(config, "norm_feature_map", False),
    )
    return fla_layout.model("linear_attn", config, dataclasses.replace(mixer, scale=feature_dim(mixer) ** -0.5))
