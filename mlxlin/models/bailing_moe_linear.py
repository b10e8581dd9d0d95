"""Ring 2.0 linear: lightning attention with normalised keys, grouped-query attention, grouped experts."""

from __future__ import annotations

from mlxlin.models import bailing_layout
from mlxlin.models.bailing_layout import ATTENTION
from mlxlin.models.common_layout import MIXER, head_dim
from mlxlin.models.config import Config, given, need
from mlxlin.models.rules import Weight
from mlxlin.models.spec import AttentionSpec, ModelSpec
from mlxlin.models.values import K_ROWS, Q_ROWS, V_ROWS

SERVES = (("bailing_moe_linear", None),)
PREFIXES = bailing_layout.PREFIXES
DROPS = bailing_layout.DROPS
_ROWS = {"q": Q_ROWS, "k": K_ROWS, "v": V_ROWS}
WEIGHTS = (
    *bailing_layout.SHARED_WEIGHTS,
    *bailing_layout.LIGHTNING_WEIGHTS,
    *(
        Weight(f"{MIXER}{part}.weight", ATTENTION + "query_key_value.weight", rows, kind="attention")
        for part, rows in _ROWS.items()
    ),
    Weight(MIXER + "q_norm.weight", ATTENTION + "query_layernorm.weight", kind="attention"),
    Weight(MIXER + "k_norm.weight", ATTENTION + "key_layernorm.weight", kind="attention"),
    Weight(MIXER + "out.weight", ATTENTION + "dense.weight", kind="attention"),
)


def spec(config: Config) -> ModelSpec:
    """The description of a checkpoint with this config.json."""
    heads, dim = need(config, "num_attention_heads"), head_dim(config)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=given(config, "num_key_value_heads", heads),
        head_dim=dim,
        scale=dim**-0.5,
        rope=bailing_layout.rope(config, bailing_layout.rotated(config)),
        qk_norm="head" if need(config, "use_qk_norm", bool) else "none",
        eps=float(given(config, "rms_norm_eps", 1e-6)),
    )
    return bailing_layout.lightning_model("bailing_moe_linear", config, attention)
