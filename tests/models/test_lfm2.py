"""LFM2 and its mixture: configs old and new, tensors as MLX tools write them, a state of convolution inputs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin import archive
from mlxlin.backend import mx
from mlxlin.convert import convert_checkpoint
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.loader import load_model
from mlxlin.models import find
from mlxlin.models.moe import Moe
from mlxlin.models.params import Params
from mlxlin.models.spec import MlpSpec, MoeSpec
from mlxlin.timeline import Timeline
from tests.models.golden import FIXTURES, TOLERANCE, Golden, difference, model_of
from tests.tiny import tiny_model

CONFIG: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
# Keys that the first checkpoints carry beside those transformers knows.
EARLY = {"block_dim": 48, "conv_dim": 48, "conv_dim_out": 48, "block_use_swiglu": True, "use_pos_enc": True}
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def mlx_tensors(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Convolutions [C, W, 1], the mixture's experts stacked, its dense parts renamed."""
    out: dict[str, mx.array] = {}
    stacks: dict[str, dict[int, mx.array]] = {}
    for name, array in tensors.items():
        stem, _, rest = name.partition(".feed_forward.experts.")
        if rest:
            expert, part, _ = rest.split(".")
            stacks.setdefault(f"{stem}.feed_forward.switch_mlp.{PARTS[part]}.weight", {})[int(expert)] = array
        else:
            for part, renamed in PARTS.items():
                name = name.replace(f".{part}.", f".{renamed}.")
            out[name] = array.swapaxes(1, 2) if name.endswith("conv.conv.weight") else array
    return out | {name: mx.stack([by[e] for e in sorted(by)]) for name, by in stacks.items()}


def fused_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """All experts in one tensor, gate and up together."""
    out = mlx_tensors(tensors)
    for name in [name for name in out if "switch_mlp.gate_proj" in name]:
        stem = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up, down = (out.pop(f"{stem}switch_mlp.{p}_proj.weight") for p in ("gate", "up", "down"))
        out[stem + "experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        out[stem + "experts.down_proj"] = down
    return out


@pytest.mark.parametrize("change", [mlx_tensors, fused_experts])
@pytest.mark.parametrize("name", ["lfm2-bias", "lfm2_moe"])
def test_tensors_in_every_layout(name: str, change: Any) -> None:
    golden = Golden.load(FIXTURES / name)
    changed = change(golden.tensors)
    assert set(changed) != set(golden.tensors)
    assert difference(model_of(golden.config, changed)(golden.row(1))[0], golden.logits(1)) < TOLERANCE


def test_early_configs_describe_the_same_model() -> None:
    early = {k: v for k, v in CONFIG.items() if k not in ("layer_types", "intermediate_size")} | EARLY
    early |= {"full_attn_idxs": [1], "block_ff_dim": 96, "tie_embedding": True, "rope_theta": 1000000.0}
    assert find(early).spec(early) == find(CONFIG).spec(CONFIG)


@pytest.mark.parametrize(
    ("keys", "hidden"),
    [
        ({}, 256),
        ({"block_multiple_of": 16}, 64),
        ({"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3}, 96),
        ({"block_multiple_of": 16, "block_ffn_dim_multiplier": None}, 64),
        ({"block_ff_dim": 100, "block_ffn_dim_multiplier": None}, 66),
        ({"block_auto_adjust_ff_dim": False}, 96),
    ],
    ids=str,
)
def test_width_of_the_feed_forward_parts(keys: dict[str, Any], hidden: int) -> None:
    assert {layer.mlp for layer in find(CONFIG).spec(CONFIG | keys).layers} == {MlpSpec(hidden)}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"block_use_swiglu": False}, "block_use_swiglu"),
        ({"use_pos_enc": False}, "use_pos_enc"),
        ({"conv_dim": 96}, "conv_dim"),
        ({"block_dim": 96}, "block_dim"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_that_change_the_mathematics_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        find(CONFIG).spec(CONFIG | keys)


@pytest.mark.parametrize(
    "keys",
    [{"layer_types": None}, {"layer_types": ["conv"]}, {"layer_types": ["mamba"] * 4}, {"full_attn_idxs": [2]}],
    ids=str,
)
def test_layer_kinds_must_be_there_and_agree(keys: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types"):
        find(CONFIG).spec(CONFIG | keys)


def test_weights_of_experts_are_divided_by_their_sum_and_a_bit() -> None:
    """Where all scores are tiny the bit decides."""
    spec = find({"model_type": "lfm2_moe"}).spec(json.loads((FIXTURES / "lfm2_moe" / "config.json").read_text()))
    mixture = spec.layers[-1].mlp
    assert isinstance(mixture, MoeSpec)
    shapes = {"gate": (6, 8, 32), "up": (6, 8, 32), "down": (6, 32, 8)}
    arrays = {f"experts.{name}.weight": mx.zeros(shape) for name, shape in shapes.items()}
    arrays |= {"router.weight": mx.zeros((6, 32)), "correction": mx.zeros((6,))}
    logits = mx.full((1, 6), -14.0)
    _, weights = Moe(mixture, Params(arrays, {}))._chosen(logits)
    score = 1 / (1 + np.exp(14.0))
    assert np.allclose(np.array(weights), 1.7 * score / (2 * score + 1e-6), rtol=1e-5)
    assert abs(2 * score - 1e-6) < 1e-6


@pytest.mark.parametrize("kinds", [["conv"] * 4, CONFIG["layer_types"]], ids=["conv", "hybrid"])
def test_a_conversation_over_convolution_states(kinds: list[str], tmp_path: Path) -> None:
    """Checkpoints, rewinding, forks and saved lines are where reading everything at once would be."""
    model = tiny_model(CONFIG | {"layer_types": kinds})
    text = np.random.default_rng(1).integers(0, 64, 90).tolist()
    line = Timeline(model)
    line.resume(text[:60])
    fork = line.fork()
    fork.advance(text[60:])
    line.rewind(1)
    line.advance(text[1:33])
    line.keep("here")
    line.advance(text[33:40])
    line.rewind(33)
    arrays, record = line.snapshot()
    archive.write(tmp_path / "line.safetensors", arrays, record)
    again = Timeline(model)
    again.restore_snapshot(*archive.read(tmp_path / "line.safetensors"))
    again.advance(text[33:34])
    for each, length in ((fork, 90), (line, 33), (again, 34)):
        _, fresh = model([text[:length]])
        found, expected = each.state.arrays(), fresh.arrays()
        assert found.keys() == expected.keys() and each.tokens == text[:length]
        assert all(difference(found[name], expected[name]) < TOLERANCE for name in found), length
    assert model.state_nbytes(1000) - model.state_nbytes(0) == (0 if kinds == ["conv"] * 4 else 1000 * 2 * 24 * 4)


@pytest.mark.parametrize("name", ["lfm2-bias", "lfm2_moe"])
def test_raw_and_converted_are_the_same_bits(name: str, tmp_path: Path) -> None:
    """Also quantised, while loading or by conversion."""
    ids = Golden.load(FIXTURES / name).row(0)
    convert_checkpoint(FIXTURES / name, tmp_path / "plain")
    convert_checkpoint(FIXTURES / name, tmp_path / "four", bits=4)
    raw, plain = load_model(FIXTURES / name)(ids)[0], load_model(tmp_path / "plain")(ids)[0]
    packed, four = load_model(FIXTURES / name, bits=4)(ids)[0], load_model(tmp_path / "four")(ids)[0]
    assert raw is not None and plain is not None and packed is not None and four is not None
    assert mx.array_equal(raw, plain) and mx.array_equal(packed, four) and not mx.array_equal(raw, packed)


def test_packed_by_mlx_tools(tmp_path: Path) -> None:
    """Matrices at 4 bits, the router at 8, as mlx-lm quantises this family: the packed numbers are used as they are."""
    golden = Golden.load(FIXTURES / "lfm2_moe")
    default, exceptions = {"group_size": 32, "bits": 4}, {}
    stored, plain = {}, {}
    for name, array in mlx_tensors(golden.tensors).items():
        stored[name] = plain[name] = array
        module = name.removesuffix(".weight")
        if array.ndim < 2 or name.endswith("conv.conv.weight") or array.shape[-1] % 32:
            continue
        settings = {**default, "bits": 8} if module.endswith("feed_forward.gate") else default
        if settings is not default:
            exceptions[module] = settings
        packed = mx.quantize(array, **settings)
        stored |= {f"{module}.{p}": a for p, a in zip(("weight", "scales", "biases"), packed, strict=True)}
        plain[name] = mx.dequantize(*packed, **settings)
    assert exceptions and any("switch_mlp.gate_proj.scales" in name for name in stored)
    for folder, tensors, more in (("q", stored, {"quantization": default | exceptions}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        mx.save_safetensors(str(tmp_path / folder / "model.safetensors"), tensors, {"format": "mlx"})
        (tmp_path / folder / "config.json").write_text(json.dumps(golden.config | more))
    convert_checkpoint(tmp_path / "q", tmp_path / "out")
    found, expected, converted = (load_model(tmp_path / f)(golden.row(0))[0] for f in ("q", "plain", "out"))
    assert found is not None and expected is not None and converted is not None
    assert difference(found, expected) < TOLERANCE and mx.array_equal(found, converted)
