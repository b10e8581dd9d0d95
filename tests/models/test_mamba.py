"""Families with Mamba-2 mixers: the spellings of their checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models import Model, QuantSpec, find
from mlxlin.state import State
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of, plan_of

Config = dict[str, Any]
Tensors = dict[str, mx.array]


def mlx_layout(tensors: Tensors) -> Tensors:
    """Convolutions [C, W, 1] and experts stacked as fc1 and fc2, as MLX tools write them."""
    out = {n: a.swapaxes(1, 2) if n.endswith("conv1d.weight") else a for n, a in tensors.items()}
    experts = sorted(n for n in tensors if ".experts." in n)
    for stem in {n.split(".experts.")[0] for n in experts}:
        count = sum(n.startswith(stem + ".experts.") for n in experts) // 2
        for part, fc in (("up_proj", "fc1"), ("down_proj", "fc2")):
            stack = [out.pop(f"{stem}.experts.{expert}.{part}.weight") for expert in range(count)]
            out[f"{stem}.switch_mlp.{fc}.weight"] = mx.stack(stack)
    return out


def stacked(tensors: Tensors) -> Tensors:
    """All experts of a projection in one tensor, as transformers 5 holds them."""
    renamed = {"switch_mlp.fc1.weight": "experts.up_proj", "switch_mlp.fc2.weight": "experts.down_proj"}
    out = {}
    for name, array in mlx_layout(tensors).items():
        new = next((name.replace(old, now) for old, now in renamed.items() if name.endswith(old)), name)
        out[new] = array.swapaxes(1, 2) if name.endswith("conv1d.weight") else array
    return out


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba2", mlx_layout),
        ("mamba2-bias", lambda tensors: {n.replace("embeddings.", "embedding."): a for n, a in tensors.items()}),
        ("bamba", mlx_layout),
        ("nemotron_h", mlx_layout),
        ("nemotron_h-moe", mlx_layout),
        ("nemotron_h-latent", stacked),
        ("nemotron_h-moe", lambda tensors: {n.replace("backbone.", "model."): a for n, a in tensors.items()}),
    ],
)
def test_every_spelling_gives_the_same_logits(name: str, change: Callable[[Tensors], Tensors]) -> None:
    golden = Golden.load(FIXTURES / name)
    changed = change(golden.tensors)
    assert set(changed) != set(golden.tensors) or change is mlx_layout
    assert bool(mx.array_equal(logits_of(golden, golden.config, changed), logits_of(golden)))


def logits_of(golden: Golden, config: Config | None = None, tensors: Tensors | None = None) -> mx.array:
    return model_of(config or golden.config, golden.tensors if tensors is None else tensors)(golden.row(1))[0]


def flas(config: Config) -> Config:
    """The config keys of flash-linear-attention."""
    names = {"layer_norm_epsilon": "norm_eps", "time_step_limit": "dt_limit"}
    return {names.get(key, key): value for key, value in config.items() if key != "num_heads"}


def authors(config: Config) -> Config:
    """The config of the authors' own releases, which names no model type."""
    inner = {"head_dim": "headdim", "state_size": "d_state", "conv_kernel": "d_conv", "n_groups": "ngroups"}
    inner |= {"use_bias": "bias", "use_conv_bias": "conv_bias"} | {k: k for k in ("D_has_hdim", "rmsnorm", "expand")}
    return {
        "d_model": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"] - 3,
        "ssm_cfg": {"layer": "Mamba2", **{new: config[old] for old, new in inner.items()}},
        "attn_layer_idx": [],
        "rms_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": config["tie_word_embeddings"],
    }


def old_nemotron(config: Config) -> Config:
    """The config keys of NVIDIA's first releases."""
    letters = {"linear_attention": "M", "mlp": "-", "full_attention": "*", "moe": "E"}
    kinds, names = config["layers_block_type"], {"head_dim": "attention_head_dim", "layer_norm_epsilon": "norm_eps"}
    renamed = {names.get(key, key): value for key, value in config.items() if key != "layers_block_type"}
    pattern = "".join(letters[kind] for kind in kinds)
    limits = [config["time_step_limit"][0], float("inf")]
    return renamed | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(kinds), "time_step_limit": limits}


def named_as_before(config: Config) -> Config:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    return config | {"layers_block_type": [names.get(kind, kind) for kind in config["layers_block_type"]]}


def old_falcon(config: Config) -> Config:
    """Before transformers 5: the rotary base beside the rest; head dims to be derived."""
    return {k: v for k, v in config.items() if k != "rope_parameters"} | {
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "mamba_d_head": "auto",
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("falcon_h1-bias", old_falcon),
        ("mamba2", flas),
        ("mamba2-fla", authors),
        ("mamba2-normless", authors),
        ("nemotron_h", old_nemotron),
        ("nemotron_h-moe", old_nemotron),
        ("nemotron_h-latent", named_as_before),
    ],
)
def test_every_config_gives_the_same_logits(name: str, change: Callable[[Config], Config]) -> None:
    golden = Golden.load(FIXTURES / name)
    config = change(golden.config)
    assert config != golden.config
    assert bool(mx.array_equal(logits_of(golden, config), logits_of(golden)))


def test_switches_that_only_one_source_obeys() -> None:
    """transformers stores norm_before_gate in old configs and gates first all the same."""
    golden = Golden.load(FIXTURES / "mamba2")
    stored = golden.config | {"norm_before_gate": True, "rms_norm": True}
    assert bool(mx.array_equal(logits_of(golden, stored), logits_of(golden)))
    assert difference(logits_of(golden, flas(stored)), golden.logits(1)) > 10 * TOLERANCE


def test_the_authors_files() -> None:
    """A head that repeats the embedding under the authors' name for it; Mamba-1 is told by its layers."""
    golden = Golden.load(FIXTURES / "mamba2-switches")
    tensors = {name.replace("embeddings.", "embedding."): array for name, array in golden.tensors.items()}
    plan = plan_of(golden.config, tensors | {"lm_head.weight": tensors["backbone.embedding.weight"]})
    assert plan.spec.tied and [name for name, _ in plan.dropped] == ["lm_head.weight"] and not plan.notices
    with pytest.raises(UnsupportedError, match="'mamba1'"):
        find({"d_model": 768, "ssm_cfg": {}})


def test_layers_of_one_part() -> None:
    golden = Golden.load(FIXTURES / "nemotron_h")
    spec = find(golden.config).spec(golden.config)
    assert [layer.kind for layer in spec.layers] == ["linear", "mlp", "attention", "linear", "mlp"]
    assert [(layer.mixer is None, layer.mlp is None) for layer in spec.layers[:2]] == [(False, True), (True, False)]
    state = model_of(golden.config, golden.tensors).fresh()
    assert [sorted(layer) if isinstance(layer, dict) else "keys" for layer in state.layers] == [
        ["S", "conv"], [], "keys", ["S", "conv"], []
    ]  # fmt: skip


def test_two_mixers_beside_each_other() -> None:
    golden = Golden.load(FIXTURES / "falcon_h1")
    model, ids = model_of(golden.config, golden.tensors), golden.row(1)
    _, state = model(ids[:, :-3])
    assert [isinstance(layer, dict) for layer in state.layers] == [True, False] * 2
    point, (_, later) = state.checkpoint(), model(ids[:, -3:], state)
    assert later.kv_length == golden.lengths[1] and State.from_arrays(later.arrays(), model.fresh()).kv_length
    for back in (state, later.restore(point), State.from_arrays(state.arrays(), model.fresh()), state.rows([0, 0])):
        logits, _ = model(mx.repeat(ids[:, -3:], back.batch, axis=0), back)
        assert difference(logits[-1:], golden.logits(1)[:, -3:]) < TOLERANCE


def test_multipliers_are_part_of_the_weights() -> None:
    golden = Golden.load(FIXTURES / "falcon_h1")
    targets = {t.name: t for t in plan_of(golden.config, golden.tensors).targets}
    stored = golden.tensors["model.layers.0.feed_forward.gate_proj.weight"]
    assert difference(targets["layers.0.mlp.gate.weight"].read(), stored * 1.5) < 1e-6
    none = {key: None for key in golden.config if key.endswith(("multiplier", "multipliers"))}
    plain = find(golden.config).spec(golden.config | none)
    assert plain.layers[0].folded == () and plain.embed_factor == plain.logit_factor == 1.0


def test_multipliers_may_be_in_the_weights_of_mlx_tools_already() -> None:
    golden = Golden.load(FIXTURES / "falcon_h1")
    with pytest.raises(UnsupportedError, match="multipliers") as error:
        plan_of(golden.config, mlx_layout(golden.tensors))
    assert "original" in error.value.hint


def test_multi_token_heads_are_dropped_and_counted() -> None:
    golden = Golden.load(FIXTURES / "nemotron_h")
    extra = {name: mx.zeros((2,)) for name in ("mtp.layers.0.mixer.in_proj.weight", "mtp.layers.1.norm.weight")}
    plan = plan_of(golden.config, golden.tensors | extra)
    assert sorted(name for name, _ in plan.dropped) == sorted(extra)
    assert [notice for notice in plan.notices if notice.startswith("dropped 2 MTP tensors")]


@pytest.mark.parametrize("name", ["mamba2", "bamba", "nemotron_h", "nemotron_h-moe", "falcon_h1"])
def test_roles(name: str) -> None:
    """Time steps and routers are small and sensitive; all else that is large is packed."""
    golden = Golden.load(FIXTURES / name)
    roles = {t.name.split(".", 2)[-1]: t.role for t in plan_of(golden.config, golden.tensors).targets}
    assert roles["mixer.decay.weight"] == "gate" and roles.get("mlp.router.weight", "gate") == "gate"
    assert {roles[f"mixer.{part}.weight"] for part in ("qkv", "gate", "out")} == {"matrix"}
    assert {roles[f"mixer.{part}"] for part in ("A_log", "dt_bias", "skip", "conv.weight", "norm.weight")} == {"keep"}
    assert roles.get("mlp.experts.up.weight", "matrix") == "matrix" and roles.get("mlp.correction", "keep") == "keep"


@pytest.mark.parametrize("name", ["mamba2", "mamba2-bias", "bamba-bias", "nemotron_h-moe"])
def test_packed_matrices_pass_through(name: str) -> None:
    """A fused projection that MLX tools have packed is cut by rows, with its scales and biases."""
    golden = Golden.load(FIXTURES / name)
    source, rounded = {}, {}
    for key, array in mlx_layout(golden.tensors).items():
        source[key] = rounded[key] = array
        if array.ndim >= 2 and array.shape[-1] % 32 == 0 and not key.endswith(("conv1d.weight", "gate.weight")):
            packed = mx.quantize(array, group_size=32, bits=8)
            stem = key.removesuffix("weight")
            source |= {stem + part: a for part, a in zip(("weight", "scales", "biases"), packed, strict=True)}
            rounded[key] = mx.dequantize(*packed, group_size=32, bits=8)
    plan = plan_of(golden.config, source)
    stems = {t.name.removesuffix(".scales") for t in plan.targets if t.name.endswith(".scales")}
    assert any(stem.endswith("mixer.qkv") for stem in stems)
    model = Model(plan.spec, {t.name: t.read() for t in plan.targets}, dict.fromkeys(stems, QuantSpec(8, 32)))
    assert difference(model(golden.row(1))[0], logits_of(golden, tensors=rounded)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("mamba2", {"model_type": "mamba2", "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [3]}, "attn_layer_idx"),
        ("mamba2", {"ssm_cfg": {"layer": "Mamba2"}, "d_intermediate": 64}, "d_intermediate"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act"),
        ("bamba", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act"),
        ("falcon_h1", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "linear"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_h", {"sliding_window": 128}, "sliding_window"),
    ],
)
def test_config_keys_that_change_the_mathematics_are_refused(name: str, change: Config, named: str) -> None:
    config = Golden.load(FIXTURES / name).config | change
    with pytest.raises(UnsupportedError, match=named):
        find(config).spec(config)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mamba2", {"num_heads": 3}, "num_heads"),
        ("mamba2", {"n_groups": 3}, "3 groups"),
        ("bamba", {"mamba_d_head": 5}, "mamba_d_head"),
        ("bamba", {"attn_layer_indices": [7]}, "attn_layer_indices"),
        ("falcon_h1", {"mamba_d_ssm": 40}, "mamba_d_ssm"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("nemotron_h", {"layers_block_type": ["mamba", "rwkv"]}, "'rwkv'"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-X"}, "'X'"),
    ],
)
def test_configs_that_contradict_themselves(name: str, change: Config, named: str) -> None:
    config = Golden.load(FIXTURES / name).config | change
    with pytest.raises(CheckpointError, match=named):
        find(config).spec(config)


def test_a_projection_of_another_size_is_named() -> None:
    golden = Golden.load(FIXTURES / "mamba2")
    name = "backbone.layers.0.mixer.in_proj.weight"
    with pytest.raises(CheckpointError, match="Mamba-2|in_proj"):
        plan_of(golden.config, golden.tensors | {name: golden.tensors[name][:-1]})
