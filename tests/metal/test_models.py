"""Models on the kernels against the same models on plain operations, and against their sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.models import Model, residual
from mlxlin.models import moe as moe_module
from mlxlin.models.moe import Moe, moe_parameters
from mlxlin.models.params import Params
from mlxlin.models.spec import MoeSpec
from mlxlin.recurrences import kernels, mixer, probe
from tests.models.golden import FIXTURES, Golden, difference, model_of
from tests.tiny import HYBRID, RECURRENT, tiny_model

from .measure import launches_of
from .tokens import COMBA, HGRN2, LINEAR_ATTENTION, MAMBA, RWKV6, SLOTS

# head sizes that the kernels take
GATED_DELTA_NET = HYBRID | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
GATED_LINEAR = RECURRENT | {"hidden_size": 128, "expand_k": 0.5, "expand_v": 1.0}
MAPPED = LINEAR_ATTENTION | {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 1, "norm_q": True}
DELTA_NET = LINEAR_ATTENTION | {
    "model_type": "delta_net",
    "architectures": ["DeltaNetForCausalLM"],
    "hidden_size": 64,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "qk_activation": "elu",
    "qk_norm": "sum",
}
RING = json.loads((FIXTURES / "bailing_moe_linear" / "config.json").read_text()) | {
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
}
AROUND = {"prefill", "gated_norm", "decode"}
MODELS = {
    "gated delta net": GATED_DELTA_NET,
    "gated linear attention": GATED_LINEAR,
    "comba": COMBA | {"num_heads": 2},
    "rwkv 6": RWKV6 | {"num_hidden_layers": 1},
    "rwkv 6, few heads": RWKV6 | {"num_hidden_layers": 1, "num_heads": 4, "hidden_size": 256},
    "hgrn2": HGRN2 | {"num_hidden_layers": 1},
    "linear attention, hedgehog": MAPPED | {"feature_map": "hedgehog", "norm_feature_map": True},
    "linear attention, t2r": MAPPED | {"feature_map": "t2r", "tie_feature_map_qk": True},
    "linear attention, dpfp": MAPPED | {"feature_map": "dpfp", "num_heads": 4, "expand_v": 2.0},
    "delta net": DELTA_NET,
    "ring": RING,
    "gated slot attention": SLOTS | {"num_hidden_layers": 2},
    "mamba 2": MAMBA | {"state_size": 32, "num_hidden_layers": 1},
}


@pytest.fixture(autouse=True)
def own_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXLIN_HOME", str(tmp_path))
    probe._verdicts.cache_clear()


def run(model: Model, prompt: int, lengths: mx.array | None = None) -> list[mx.array]:
    """Logits of a prompt and of three tokens after it."""
    tokens = mx.array(np.random.default_rng(1).integers(0, 64, (2, prompt + 3)), dtype=mx.int32)
    logits, state = model(tokens[:, :prompt], lengths=lengths, logits="last")
    outputs = [logits[:, -1]]
    for t in range(3):
        logits, state = model(tokens[:, prompt + t : prompt + t + 1], state)
        outputs.append(logits[:, -1])
    return outputs


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_model_gives_the_same_logits_by_kernels(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = tiny_model(config), mx.array([33, 17])
    plain = run(model, 33, lengths)
    for module in (kernels, mixer):
        monkeypatch.setattr(module, "on_metal", lambda: True)
    monkeypatch.setattr(kernels, "trusted", lambda *_: True)
    monkeypatch.setattr(mixer, "trusted_by_key", lambda *_: True)
    by_kernels: list[mx.array] = []
    launches = launches_of(lambda: by_kernels.extend(run(model, 33, lengths)))
    names = {launch.name for launch in launches}
    assert names >= AROUND and names & {"chunk", "scan"}  # where outputs are normalised there are no chunks
    for a, b in zip(by_kernels, plain, strict=True):
        assert float(mx.abs(a - b).max()) < 1e-4 * float(mx.abs(b).max())


@pytest.mark.parametrize("groups", [1, 4])
def test_experts_are_chosen_by_one_kernel(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MoeSpec(32, 4, 16, score="sigmoid", correction=True, groups=groups, groups_kept=2, factor=2.5)
    key, arrays = mx.random.key(3), {}
    for name, parameter in moe_parameters(spec, 24).items():
        key, own = mx.random.split(key)
        arrays[name] = mx.random.normal(parameter.shape, key=own) * 0.3
    moe, x = Moe(spec, Params(arrays, {})), mx.random.normal((1, 7, 24), key=key)
    plain = moe(x)
    monkeypatch.setattr(moe_module, "on_metal", lambda: True)
    assert moe._complaint() == ""
    assert {launch.name for launch in launches_of(lambda: moe(x))} == {"router_topk"}
    assert float(mx.abs(moe(x) - plain).max()) < 1e-5 * float(mx.abs(plain).max())


# experts routed in every way; norms of both kinds, behind parts, of groups; layers of one part, of two mixers
FAMILIES = [
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "minimax",
    "nemotron_h-latent",
    "olmo_hybrid",
    "qwen3_5_moe",
    "rwkv7",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_by_kernels_give_the_logits_of_the_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixers of these small models have sizes that the kernels do not take; all that stands around them runs."""
    for module in (moe_module, residual):
        monkeypatch.setattr(module, "on_metal", lambda: True)
        monkeypatch.setattr(module, "trusted_by_key", lambda *_: True)
    golden = Golden.load(FIXTURES / name)
    model, ids = model_of(golden.config, golden.tensors), golden.row(0)
    found: list[mx.array] = []

    def call() -> None:
        first, state = model(ids[:, :-1])
        found.extend([first, model(ids[:, -1:], state)[0]])

    launches = {launch.name for launch in launches_of(call)}
    assert "add_norm" in launches and ("router_topk" in launches) == any(
        isinstance(layer.mlp, MoeSpec) for layer in model.spec.layers
    )
    assert difference(mx.concatenate(found, axis=1), golden.logits(0)) < 1e-4
