"""Checkpoints quantised by MLX tools load directly, and convert without losing a bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.convert import convert_checkpoint
from mlxlin.convert.formats import open_checkpoint
from mlxlin.errors import CheckpointError, InputError, UnsupportedError
from mlxlin.loader import load_model
from tests.convert.checkpoints import CONFIG, logits, mlx_layout, same, save, weights
from tests.models.golden import FIXTURES

NARROW = {"group_size": 32, "bits": 4}


def quantised(
    specs: dict[str, dict[str, Any]], default: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The tiny model as MLX tools quantise it (matrices named in `specs` otherwise), and the same numbers unpacked."""
    stored: dict[str, Any] = {}
    plain: dict[str, np.ndarray] = {}
    for name, array in mlx_layout(weights()).items():
        module = name.removesuffix(".weight")
        spec = specs.get(module, default)
        if array.ndim != 2 or not name.endswith(".weight") or spec is False:
            stored[name] = plain[name] = array
            continue
        parts = mx.quantize(mx.array(array), **spec)
        for part, value in zip(("weight", "scales", "biases"), parts, strict=False):
            stored[f"{module}.{part}"] = np.array(value)
        plain[name] = np.array(mx.dequantize(*parts, **spec, dtype=mx.float32))
    return stored, plain


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_weights_are_used_as_they_are(tmp_path: Path, bits: int) -> None:
    default = {"group_size": 32, "bits": bits}
    stored, plain = quantised({}, default)
    save(tmp_path / "q", stored, {**CONFIG, "quantization": default, "quantization_config": default})
    save(tmp_path / "plain", plain)
    convert_checkpoint(tmp_path / "q", tmp_path / "out")
    expected = logits(tmp_path / "plain")
    assert same(logits(tmp_path / "q"), expected) and same(logits(tmp_path / "out"), expected)
    kept = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert isinstance(kept, dict)
    original = stored["model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert np.array_equal(np.array(kept["layers.0.mixer.qkv.weight"]), original)


@pytest.mark.parametrize("mode", [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)], ids=lambda m: m[0])
def test_floating_point_modes(tmp_path: Path, mode: tuple[str, int, int]) -> None:
    default = {"group_size": mode[2], "bits": mode[1], "mode": mode[0]}
    stored, plain = quantised({}, default)
    save(tmp_path / "q", stored, {**CONFIG, "quantization": default})
    assert same(logits(tmp_path / "q"), logits(save(tmp_path / "plain", plain)))


def test_exceptions_per_matrix_are_obeyed(tmp_path: Path) -> None:
    specs: dict[str, Any] = {
        "model.layers.0.linear_attn.in_proj_a": {"group_size": 64, "bits": 8},
        "model.layers.1.mlp.gate_proj": {"group_size": 32, "bits": 6},
        "model.layers.2.mlp.up_proj": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        "lm_head": False,
    }
    stored, plain = quantised(specs, NARROW)
    specs["model.layers.0.linear_attn.in_proj_a"] = {"group_size": None, "bits": 8, "mode": "affine"}  # as tools write
    save(tmp_path / "q", stored, {**CONFIG, "quantization": {**NARROW, "mode": "affine", **specs}})
    assert same(logits(tmp_path / "q"), logits(save(tmp_path / "plain", plain)))
    convert_checkpoint(tmp_path / "q", tmp_path / "out")
    assert same(logits(tmp_path / "out"), logits(tmp_path / "plain"))


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    save(tmp_path / "q", quantised({}, NARROW)[0], {**CONFIG, "quantization": NARROW})
    with pytest.raises(InputError, match="already quantised"):
        convert_checkpoint(tmp_path / "q", tmp_path / "out", bits=8)
    with pytest.raises(InputError, match="already quantised"):
        logits(tmp_path / "q", bits=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["scales", "biases", "bits", "group", "false", "mode"])
def test_what_contradicts_itself_is_named(tmp_path: Path, damage: str) -> None:
    stored, _ = quantised({}, NARROW)
    settings: dict[str, Any] = dict(NARROW)
    if damage in ("scales", "biases"):
        del stored[f"model.layers.0.mlp.up_proj.{damage}"]
    settings |= {
        "bits": {"bits": 8},
        "group": {"group_size": 64},
        "false": {"model.layers.0.mlp.up_proj": False},
        "mode": {"mode": "ternary"},
    }.get(damage, {})
    save(tmp_path, stored, {**CONFIG, "quantization": settings})
    kind = UnsupportedError if damage == "mode" else CheckpointError
    names = {"bits": "embed_tokens", "group": "embed_tokens", "mode": "ternary"}
    with pytest.raises(kind, match=names.get(damage, "model.layers.0.mlp.up_proj")):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value_bits", [4, 6])
def test_matrices_joined_into_one_parameter(tmp_path: Path, value_bits: int) -> None:
    """q, k and v are one matrix inside; quantised alike they stay packed, otherwise they become plain numbers."""
    folder = FIXTURES / "gla"
    original = mx.load(str(folder / "model.safetensors"))
    assert isinstance(original, dict)
    default, other = {"group_size": 32, "bits": 4}, {"group_size": 32, "bits": value_bits}
    stored: dict[str, Any] = {}
    plain: dict[str, np.ndarray] = {}
    exceptions: dict[str, Any] = {}
    for name, array in original.items():
        stored[name] = plain[name] = np.array(array)
        module = name.removesuffix(".weight")
        if re.search(r"attn\.[qkv]_proj\.weight", name):
            spec = other if "v_proj" in name else default
            exceptions |= {module: spec} if "v_proj" in name else {}
            parts = mx.quantize(array, **spec)
            for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
                stored[f"{module}.{part}"] = np.array(value)
            plain[name] = np.array(mx.dequantize(*parts, **spec))
    settings = json.loads((folder / "config.json").read_text())
    save(tmp_path / "q", stored, {**settings, "quantization": {**default, **exceptions}})
    save(tmp_path / "plain", plain, settings)
    notices: list[str] = []
    tokens = mx.array([[1, 5, 9, 33, 60]])
    results = [load_model(path, notice=notices.append)(tokens)[0] for path in (tmp_path / "q", tmp_path / "plain")]
    assert results[0] is not None and results[1] is not None and same(results[0], results[1])
    report = convert_checkpoint(tmp_path / "q", dry_run=True)
    assert bool(report.prepared.quantization) == (value_bits == 4)
    assert any("6 matrices that are joined" in text for text in notices) == (value_bits == 6)
