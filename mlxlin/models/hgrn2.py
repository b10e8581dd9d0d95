"""HGRN2 in flash-linear-attention's layout (Qin et al. 2024, arXiv:2404.07904)."""

from __future__ import annotations

from dataclasses import replace

from mlxlin.errors import CheckpointError
from mlxlin.models import fla_layout
from mlxlin.models.common_layout import shared_width
from mlxlin.models.config import Config, given, need, nullable
from mlxlin.models.fla_layout import ATTN, MIXER
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LayerSpec, LinearSpec, ModelSpec, NormSpec, OutputSpec
from mlxlin.models.values import CONCAT, CONV

SERVES = (("hgrn2", None),)
PREFIXES = fla_layout.PREFIXES
DROPS = fla_layout.DROPS
WEIGHTS = (
    *fla_layout.SHARED_WEIGHTS,
    Weight(MIXER + "qkv.weight", (ATTN + "q_proj.weight", ATTN + "i_proj.weight"), CONCAT),
    Weight(MIXER + "decay.weight", ATTN + "f_proj.weight"),
    Weight(MIXER + "conv.weight", tuple(ATTN + f"{part}_conv1d.weight" for part in "qif"), CONV),
    Weight(MIXER + "bounds", "lower_bounds"),
    Weight(MIXER + "norm.weight", ATTN + "g_norm.weight"),
)
# The source calls a function here that does not hear of the config's epsilon.
_OUTPUT_EPS = 1e-5


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    width, layers = need(config, "hidden_size"), need(config, "num_hidden_layers")
    key_dim = nullable(config, "expand_ratio", 128) or shared_width(width, need(config, "num_heads"))
    if width % key_dim:
        raise CheckpointError(f"config.json: expand_ratio {key_dim} does not divide hidden_size {width}.")
    mixer = LinearSpec(
        rule="gated",
        heads=width // key_dim,
        value_heads=width // key_dim,
        key_dim=key_dim,
        value_dim=key_dim,
        scale=key_dim**-0.5,
        output=OutputSpec(NormSpec(_OUTPUT_EPS, affine=given(config, "elementwise_affine", True)), joint=True),
        conv=fla_layout.taps(config, default=False),
        features="silu_q",
        decay=DecaySpec("forget", vector=True, bounds=layers if given(config, "use_lower_bound", True) else 0),
    )
    model = fla_layout.model("hgrn2", config, mixer)
    return replace(model, layers=tuple(_placed(layer, index) for index, layer in enumerate(model.layers)))


def _placed(layer: LayerSpec, index: int) -> LayerSpec:
    """`layer`, told which row of the table of bounds is its own."""
    mixer = layer.mixer
    if not isinstance(mixer, LinearSpec) or mixer.decay is None or not mixer.decay.bounds:
        return layer
    return replace(layer, mixer=replace(mixer, decay=replace(mixer.decay, layer=index)))
