"""From a checkpoint's config and tensors to a model: names, layouts, what is dropped, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models import FAMILIES, Model, ModelSpec, QuantSpec, family, find, parameters
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of, plan_of

Tensors = dict[str, mx.array]


@pytest.fixture(scope="module")
def qwen() -> Golden:
    return Golden.load(FIXTURES / "qwen3_5")


@pytest.fixture(scope="module")
def tied() -> Golden:
    return Golden.load(FIXTURES / "qwen3_5-layout")


def logits_of(golden: Golden, config: dict[str, Any], tensors: Tensors) -> mx.array:
    return model_of(config, tensors)(golden.row(1))[0]


def mlx_layout(tensors: Tensors) -> Tensors:
    """What MLX tools write: convolutions [C, W, 1], and the one already in the zero-centred gains."""
    out = {}
    for name, array in tensors.items():
        if name.endswith("conv1d.weight"):
            array = array.swapaxes(1, 2)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + 1
        out[name] = array
    return out


def test_b01_raw_and_mlx_layout_give_the_same_logits(qwen: Golden) -> None:
    raw, written = qwen.tensors, mlx_layout(qwen.tensors)
    extra = {"mtp.layers.0.input_layernorm.weight": mx.zeros((32,))}
    expected = qwen.logits(1)
    for tensors in (raw, written, raw | extra, written | extra):
        assert difference(logits_of(qwen, qwen.config, tensors), expected) < TOLERANCE


def test_b01_gains_near_one_are_not_mistaken_for_written_ones(qwen: Golden) -> None:
    """The layout decides, never the values."""
    large = {n: a + 1 if n.endswith("layernorm.weight") else a for n, a in qwen.tensors.items()}
    targets = {t.name: t for t in plan_of(qwen.config, large).targets}
    name = "model.layers.0.input_layernorm.weight"
    assert difference(targets["layers.0.mixer_norm.weight"].read(), large[name] + 1) == 0.0


def test_b01_mixed_layouts_are_refused(qwen: Golden) -> None:
    name = "model.layers.0.linear_attn.conv1d.weight"
    with pytest.raises(CheckpointError, match="different layouts"):
        plan_of(qwen.config, qwen.tensors | {name: qwen.tensors[name].swapaxes(1, 2)})


def test_b06_a_head_saved_beside_a_tied_embedding(tied: Golden) -> None:
    embedding = tied.tensors["model.embed_tokens.weight"]
    same = plan_of(tied.config, tied.tensors | {"lm_head.weight": embedding})
    assert same.spec.tied and [name for name, _ in same.dropped] == ["lm_head.weight"] and not same.notices
    assert (
        difference(logits_of(tied, tied.config, tied.tensors | {"lm_head.weight": embedding}), tied.logits(1))
        < TOLERANCE
    )
    other = tied.tensors | {"lm_head.weight": embedding * 2}
    plan = plan_of(tied.config, other)
    assert not plan.spec.tied and "differs" in plan.notices[0]
    assert difference(logits_of(tied, tied.config, other), tied.logits(1) * 2) < 2 * TOLERANCE


def test_b06_tied_only_inside_the_text_config(tied: Golden) -> None:
    for top in ({}, {"tie_word_embeddings": False}):
        config = {"model_type": "qwen3_5", "text_config": tied.config, **top}
        assert difference(logits_of(tied, config, tied.tensors), tied.logits(1)) < TOLERANCE


def test_b06_an_untied_head_must_be_there(qwen: Golden) -> None:
    with pytest.raises(CheckpointError, match="lacks tensor 'lm_head.weight'"):
        plan_of(qwen.config, {n: a for n, a in qwen.tensors.items() if n != "lm_head.weight"})


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_b07_multimodal_wrappers(qwen: Golden, prefix: str) -> None:
    tensors = {name.replace("model.", prefix, 1): array for name, array in qwen.tensors.items()}
    if prefix == "language_model.model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    pictures = ["model.visual.blocks.0.attn.qkv.weight", "visual.patch_embed.weight", "vision_tower.a.weight"]
    tensors |= {name: mx.zeros((2, 2)) for name in pictures}
    config = {"model_type": "qwen3_5", "text_config": qwen.config, "vision_config": {"depth": 1}}
    plan = plan_of(config, tensors)
    assert sorted(name for name, _ in plan.dropped) == sorted(pictures)
    assert plan.notices == ["dropped 3 vision tensors (only the text part is read)"]
    assert difference(logits_of(qwen, config, tensors), qwen.logits(1)) < TOLERANCE


def test_b08_multi_token_heads_are_dropped_and_counted(qwen: Golden) -> None:
    names = ["mtp.fc.weight", *(f"mtp.layers.0.part{i}.weight" for i in range(10)), "model.mtp.norm.weight"]
    plan = plan_of(qwen.config, qwen.tensors | {name: mx.zeros((2,)) for name in names})
    assert sorted(name for name, _ in plan.dropped) == sorted(names)
    assert [notice for notice in plan.notices if notice.startswith("dropped 12 MTP tensors")]


def test_b16_layer_types_are_obeyed(qwen: Golden, tied: Golden) -> None:
    kinds = [layer.mixer.kind for layer in find(tied.config).spec(tied.config).layers]
    assert kinds == ["attention", "linear", "linear", "attention"]
    derived = {k: v for k, v in qwen.config.items() if k != "layer_types"} | {"full_attention_interval": 2}
    assert [layer.mixer.kind for layer in find(derived).spec(derived).layers] == ["linear", "attention"] * 2
    with pytest.raises(CheckpointError, match="contradicts full_attention_interval"):
        contradiction = tied.config | {"full_attention_interval": 4}
        find(contradiction).spec(contradiction)


def test_every_tensor_is_accounted_for(qwen: Golden) -> None:
    for name in qwen.tensors:
        with pytest.raises(CheckpointError, match=f"lacks tensor '{name.removeprefix('model.')}'"):
            plan_of(qwen.config, {n: a for n, a in qwen.tensors.items() if n != name})
    with pytest.raises(CheckpointError, match="unknown tensor 'model.layers.0.mlp.extra.weight'"):
        plan_of(qwen.config, qwen.tensors | {"model.layers.0.mlp.extra.weight": mx.zeros((2,))})
    with pytest.raises(CheckpointError, match="both"):
        plan_of(qwen.config, qwen.tensors | {"language_model.model.norm.weight": mx.zeros((32,))})


@pytest.mark.parametrize("suffix", ["mlp.down_proj.weight", "linear_attn.conv1d.weight", "linear_attn.A_log"])
def test_wrong_shapes_name_the_tensor(qwen: Golden, suffix: str) -> None:
    name = f"model.layers.0.{suffix}"
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        plan_of(qwen.config, qwen.tensors | {name: qwen.tensors[name][..., :-1]})


def test_plan_describes_what_it_reads(qwen: Golden) -> None:
    plan = plan_of(qwen.config, qwen.tensors)
    table = parameters(plan.spec)
    assert [target.name for target in plan.targets] == list(table)
    for target in plan.targets:
        assert tuple(target.read().shape) == target.shape == table[target.name].shape
        assert target.role == table[target.name].role and set(target.sources) <= set(qwen.tensors)
    roles = {t.name.split(".", 2)[-1]: t.role for t in plan.targets if t.name.startswith("layers.0.")}
    assert roles["mixer.qkv.weight"] == "matrix" and roles["mixer.beta.weight"] == roles["mixer.decay.weight"] == "gate"
    assert {roles[n] for n in ("mixer.A_log", "mixer.dt_bias", "mixer.conv.weight", "mixer_norm.weight")} == {"keep"}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-layout", "gated_deltanet-hybrid"])
def test_packed_matrices_pass_through(name: str) -> None:
    """An MLX-quantised checkpoint: weight, scales and biases go through the same rules as plain matrices."""
    golden = Golden.load(FIXTURES / name)
    spec = QuantSpec(8, 32)
    source, rounded = {}, {}
    for key, array in golden.tensors.items():
        if array.ndim == 2 and array.shape[1] % 32 == 0 and "norm" not in key:
            packed = mx.quantize(array, group_size=32, bits=8)
            source |= {
                key.removesuffix("weight") + part: a
                for part, a in zip(("weight", "scales", "biases"), packed, strict=True)
            }
            rounded[key] = mx.dequantize(*packed, group_size=32, bits=8)
        else:
            source[key] = rounded[key] = array
    plan = plan_of(golden.config, source)
    stems = {t.name.removesuffix(".scales") for t in plan.targets if t.name.endswith(".scales")}
    model = Model(plan.spec, {t.name: t.read() for t in plan.targets}, dict.fromkeys(stems, spec))
    assert difference(model(golden.row(1))[0], logits_of(golden, golden.config, rounded)) < TOLERANCE


def test_parameters_must_fit(qwen: Golden) -> None:
    plan = plan_of(qwen.config, qwen.tensors)
    params = {target.name: target.read() for target in plan.targets}
    emptied = dict(params)
    Model(plan.spec, emptied)
    assert not emptied
    with pytest.raises(CheckpointError, match="'layers.0.mixer.extra' is not part"):
        Model(plan.spec, params | {"layers.0.mixer.extra": mx.zeros((1,))})
    with pytest.raises(CheckpointError, match="'layers.1.mlp.down.weight' is missing"):
        Model(plan.spec, {n: a for n, a in params.items() if n != "layers.1.mlp.down.weight"})


def test_finding_a_family() -> None:
    for name in FAMILIES:
        module = family(name)
        for model_type, architecture in module.SERVES:
            found = find({"model_type": model_type, "architectures": [architecture] if architecture else []})
            assert found is module
    with pytest.raises(UnsupportedError, match="qwen3_55") as error:
        find({"model_type": "qwen3_55"})
    assert "'qwen3_5'" in error.value.hint
    with pytest.raises(CheckpointError, match="model_type"):
        find({})


@pytest.mark.parametrize(
    ("fixture", "key", "value"),
    [
        ("qwen3_5", "hidden_act", "gelu"),
        ("qwen3_5", "rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}),
        ("qwen3_5", "rope_parameters", {"rope_type": "default", "short_factor": [1.0]}),
        ("qwen3_5", "sliding_window", 128),
        ("gated_deltanet", "attnres_block_size", 4),
        ("gated_deltanet", "hidden_act", "powlu"),
        ("gla", "feature_map", "gelu"),
        ("gla", "share_conv_kernel", True),
        ("delta_net", "qk_norm", "max"),
        ("delta_net", "norm_first", True),
        ("linear_attn", "feature_map", "performer"),
        ("kda-hybrid", "safe_gate", True),
        ("gsa", "feature_map", "t2r"),
        ("rwkv6", "norm_first", False),
        ("rwkv6", "attn", {"layers": [1], "num_heads": 4}),
        ("comba", "attnres_block_size", 4),
        ("bailing_moe_linear", "linear_silu", True),
        ("bailing_moe_linear", "norm_head", True),
        ("bailing_moe_linear", "score_function", "softmax"),
        ("bailing_moe_linear", "norm_topk_prob", False),
        ("bailing_moe_linear", "num_experts_per_tok", 1),
        ("bailing_moe_linear", "moe_shared_expert_intermediate_size", 16),
        ("bailing_moe_linear", "num_kv_heads_for_linear_attn", 2),
        ("bailing_moe_v2_5", "use_qkv_bias", True),
        ("bailing_moe_v2_5", "rope_interleave", False),
        ("olmo_hybrid", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("bailing_moe_v2_5", "rope_scaling", {"rope_scaling": "yarn"}),
        ("minimax", "hidden_act", "gelu"),
        ("minimax", "partial_rotary_factor", 0.5),
        ("minimax", "rotary_dim", 4),
        ("minimax", "shared_intermediate_size", 16),
    ],
)
def test_config_keys_that_change_the_mathematics_are_refused(fixture: str, key: str, value: Any) -> None:
    config = json.loads((FIXTURES / fixture / "config.json").read_text()) | {key: value}
    wanted = next(iter(value)) if isinstance(value, dict) else key
    with pytest.raises(UnsupportedError, match=wanted if fixture != "qwen3_5" or key != "rope_parameters" else "rope"):
        find(config).spec(config)


def test_descriptions_are_read_strictly(qwen: Golden) -> None:
    data = find(qwen.config).spec(qwen.config).to_json()
    for change in (
        {"format": 99},
        {"vocab": "64"},
        {"extra": 1},
        {"layers": [{"mixer": {"kind": "unheard"}, "mlp": {"hidden": 1}, "norm": {"eps": 1e-6}}]},
    ):
        with pytest.raises(CheckpointError):
            ModelSpec.from_json(data | change)
    with pytest.raises(CheckpointError, match="lacks 'width'"):
        ModelSpec.from_json({k: v for k, v in data.items() if k != "width"})
