"""Granite 4: names of the hub, of transformers and of MLX tools; factors of muP; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxlin.backend import mx
from mlxlin.convert import convert_checkpoint
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.layerwise import Layerwise
from mlxlin.loader import load_model, open_path
from mlxlin.models import find
from mlxlin.models.spec import AttentionSpec
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of

Tensors = dict[str, mx.array]
NAMES = ["granitemoehybrid", "granitemoehybrid-dense"]


def in_memory(tensors: Tensors) -> Tensors:
    """As transformers names the experts of a loaded model."""
    names = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    return {
        next((k.replace(o, n) for o, n in names.items() if k.endswith(f"block_sparse_moe.{o}")), k): a
        for k, a in tensors.items()
    }


def mlx_tensors(tensors: Tensors) -> Tensors:
    """Convolutions [C, W, 1]; the halves of the experts, or of the only feed-forward part, by themselves."""
    out: Tensors = {}
    mixture = any("block_sparse_moe" in name for name in tensors)
    for name, array in tensors.items():
        stem, _, part = name.partition(".block_sparse_moe." if mixture else ".shared_mlp.")
        target = f"{stem}.block_sparse_moe.switch_mlp" if mixture else f"{stem}.mlp"
        if part == "input_linear.weight":
            halves = mx.split(array, 2, axis=-2)
            out |= {f"{target}.{p}_proj.weight": half for p, half in zip(("gate", "up"), halves, strict=True)}
        elif part == "output_linear.weight":
            out[f"{target}.down_proj.weight"] = array
        else:
            out[name] = array.swapaxes(1, 2) if name.endswith("conv1d.weight") else array
    return out


@pytest.mark.parametrize(("name", "change"), [(NAMES[0], in_memory), *((name, mlx_tensors) for name in NAMES)])
def test_tensors_in_every_layout(name: str, change: Any) -> None:
    golden = Golden.load(FIXTURES / name)
    changed = change(golden.tensors)
    assert set(changed) != set(golden.tensors)
    assert difference(model_of(golden.config, changed)(golden.row(1))[0], golden.logits(1)) < TOLERANCE


def hub(config: dict[str, Any]) -> dict[str, Any]:
    """The hub's spelling of a config that transformers wrote."""
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    out = {k: v for k, v in config.items() if k not in ("rope_parameters", "time_step_limit")}
    out |= {"layer_types": [kinds[kind] for kind in config["layer_types"]], "mamba_d_head": "auto"}
    out |= {"normalization_function": "rmsnorm", "rope_scaling": None}
    if config["position_embedding_type"] is None:
        return out | {"position_embedding_type": "nope", "rope_theta": 10000}
    return out | {"rope_theta": config["rope_parameters"]["rope_theta"]}


@pytest.mark.parametrize("name", NAMES)
def test_configs_of_the_hub_describe_the_same_model(name: str) -> None:
    config = Golden.load(FIXTURES / name).config
    spec = find(config).spec(config)
    assert find(config).spec(hub(config)) == spec
    moved = {k: v for k, v in config.items() if k != "layer_types"} | {"layers_block_type": config["layer_types"]}
    assert find(config).spec(moved) == spec
    attention = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec))
    assert (attention.rope is None) == (config["position_embedding_type"] is None)


def test_a_model_of_attention_alone_needs_no_keys_of_mamba() -> None:
    config = Golden.load(FIXTURES / NAMES[1]).config
    plain = {k: v for k, v in config.items() if not k.startswith("mamba_")} | {"layer_types": ["attention"] * 3}
    assert {layer.kind for layer in find(plain).spec(plain).layers} == {"attention"}


@pytest.mark.parametrize(
    "key", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
def test_every_factor_counts(key: str) -> None:
    golden = Golden.load(FIXTURES / NAMES[0])
    other = model_of(golden.config | {key: 1.1 * golden.config[key]}, golden.tensors)
    assert difference(other(golden.row(0))[0], golden.logits(0)) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"normalization_function": "layernorm"}, "normalization_function"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_that_change_the_mathematics_are_refused(keys: dict[str, Any], named: str) -> None:
    config = Golden.load(FIXTURES / NAMES[1]).config
    with pytest.raises(UnsupportedError, match=named):
        find(config).spec(config | keys)


@pytest.mark.parametrize("kinds", [None, ["mamba"], ["mamba", "conv", "mamba"]], ids=str)
def test_every_layer_must_be_named(kinds: list[str] | None) -> None:
    config = Golden.load(FIXTURES / NAMES[0]).config
    with pytest.raises(CheckpointError, match="layer_types"):
        find(config).spec(config | {"layer_types": kinds})


@pytest.mark.parametrize("name", NAMES)
def test_raw_and_converted_are_the_same_bits(name: str, tmp_path: Path) -> None:
    """Also quantised, while loading or by conversion, and layer by layer."""
    ids = Golden.load(FIXTURES / name).row(0)
    convert_checkpoint(FIXTURES / name, tmp_path / "plain")
    convert_checkpoint(FIXTURES / name, tmp_path / "four", bits=4)
    raw, plain = load_model(FIXTURES / name)(ids)[0], load_model(tmp_path / "plain")(ids)[0]
    packed, four = load_model(FIXTURES / name, bits=4)(ids)[0], load_model(tmp_path / "four")(ids)[0]
    assert raw is not None and plain is not None and packed is not None and four is not None
    assert mx.array_equal(raw, plain) and mx.array_equal(packed, four) and not mx.array_equal(raw, packed)
    layerwise = Layerwise(open_path(FIXTURES / name), ids[0].tolist())
    assert difference(layerwise.logits(layerwise.hidden()), raw[0]) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_packed_by_mlx_tools(name: str, tmp_path: Path) -> None:
    """Halves that are still one packed matrix are taken apart; packed numbers are used as they are."""
    golden = Golden.load(FIXTURES / name)
    default = {"group_size": 32, "bits": 4}
    stored, plain = {}, {}
    for key, array in mlx_tensors(golden.tensors).items():
        stored[key] = plain[key] = array
        if array.ndim < 2 or key.endswith("conv1d.weight") or array.shape[-1] % 32:
            continue
        module, packed = key.removesuffix(".weight"), mx.quantize(array, **default)
        stored |= {f"{module}.{p}": a for p, a in zip(("weight", "scales", "biases"), packed, strict=True)}
        plain[key] = mx.dequantize(*packed, **default)
    halved = "shared_mlp.input_linear.scales" if name == NAMES[0] else "mlp.gate_proj.scales"
    assert any(key.endswith(halved) for key in stored) and any("in_proj.scales" in key for key in stored)
    for folder, tensors, more in (("q", stored, {"quantization": default}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        mx.save_safetensors(str(tmp_path / folder / "model.safetensors"), tensors, {"format": "mlx"})
        (tmp_path / folder / "config.json").write_text(json.dumps(golden.config | more))
    convert_checkpoint(tmp_path / "q", tmp_path / "out")
    found, expected, converted = (load_model(tmp_path / f)(golden.row(0))[0] for f in ("q", "plain", "out"))
    assert found is not None and expected is not None and converted is not None
    assert difference(found, expected) < TOLERANCE and mx.array_equal(found, converted)
