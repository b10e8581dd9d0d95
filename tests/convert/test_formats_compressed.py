"""compressed-tensors: FP8 and packed integers, against the format's definition in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.convert import convert_checkpoint
from mlxlin.convert.formats import open_checkpoint
from mlxlin.errors import CheckpointError, MlxlinError, UnsupportedError
from mlxlin.models import QuantSpec
from tests.convert.checkpoints import CONFIG, bf16, logits, same, save, save_safetensors, weights
from tests.convert.test_formats_fp8 import e4m3


def settings(form: str, **weight: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weight}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of unsigned values along the last axis, lowest bits first."""
    per_word = 32 // bits
    padded = np.pad(values, [(0, 0), (0, -values.shape[1] % per_word)]).astype(np.uint64)
    words = padded.reshape(values.shape[0], -1, per_word)
    return (words << (np.arange(per_word, dtype=np.uint64) * bits)).sum(-1).astype(np.uint32).view(np.int32)


def open_one(folder: Path, tensors: dict[str, Any], configuration: dict[str, Any]) -> mx.array:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": configuration}))
    save_safetensors(folder / "model.safetensors", tensors)
    opened = open_checkpoint(folder, mx.float32)
    opened = opened.unpack(opened.quantization)
    assert opened.format == "compressed-tensors" and set(opened.tensors) == {"x.weight"}
    return opened.tensors["x.weight"].read()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["group", "channel", "asymmetric", "reordered"])
def test_packed_integers_equal_the_definition(tmp_path: Path, bits: int, kind: str) -> None:
    rng = np.random.default_rng(bits)
    rows, cols, groups = 20, 64, 1 if kind == "channel" else 4
    half = 1 << (bits - 1)
    codes = rng.integers(-half, half, (rows, cols))
    # bfloat16, as real ones are: then scale times a small integer is exact, in whatever order it is computed
    scale = np.array(mx.array(rng.uniform(0.01, 0.1, (rows, groups))).astype(mx.bfloat16).astype(mx.float32))
    zero = rng.integers(-half, half, (rows, groups)) if kind == "asymmetric" else np.zeros((rows, groups), int)
    index = np.arange(cols) // (cols // groups)
    tensors: dict[str, Any] = {
        "x.weight_packed": pack(codes + half, bits),
        "x.weight_scale": scale,
        "x.weight_shape": np.array([rows, cols]),
    }
    if kind == "asymmetric":
        tensors["x.weight_zero_point"] = np.ascontiguousarray(pack((zero + half).T, bits).T)
    if kind == "reordered":
        index = rng.permutation(index)
        tensors["x.weight_g_idx"] = index.astype(np.int32)
    expected = scale[:, index] * (codes - zero[:, index]).astype(np.float32)
    strategy = "channel" if kind == "channel" else "group"
    got = open_one(tmp_path, tensors, settings("pack-quantized", num_bits=bits, type="int", strategy=strategy))
    assert same(got, mx.array(expected.astype(np.float32)))


def test_packed_integers_made_plain_are_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays packed as MLX does, and is unpacked after all (to be joined with another matrix), in bands."""
    monkeypatch.setattr("mlxlin.convert.formats.mlx_quantized._BAND", 3 * 64)
    rng = np.random.default_rng(7)
    codes, scale = rng.integers(-8, 8, (20, 64)), mx.array(rng.uniform(0.01, 0.1, (20, 2))).astype(mx.bfloat16)
    stored = ("BF16", np.array(scale.view(mx.uint16)))
    tensors = {"x.weight_packed": pack(codes + 8, 4), "x.weight_scale": stored, "x.weight_shape": np.array([20, 64])}
    got = open_one(tmp_path, tensors, settings("pack-quantized", num_bits=4, type="int", strategy="group"))
    expected = np.repeat(np.array(scale.astype(mx.float32)), 32, 1) * codes.astype(np.float32)
    assert same(got, mx.array(expected).astype(mx.bfloat16))


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_fp8_scales_per_tensor_row_and_block(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 120, (150, 140)).astype(np.uint8)
    shape = {"tensor": (1,), "channel": (150, 1), "block": (2, 2)}[kind]
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    factor = scale if kind != "block" else np.repeat(np.repeat(scale, 128, 0), 128, 1)[:150, :140]
    extra = {"block_structure": [128, 128]} if kind == "block" else {}
    configuration = settings("float-quantized", num_bits=8, type="float", strategy=kind, **extra)
    configuration["sparsity_config"] = None  # as some versions write where there is none
    tensors = {"x.weight": ("F8_E4M3", codes), "x.weight_scale": scale, "x.input_scale": np.ones(1, np.float32)}
    got = open_one(tmp_path, tensors, configuration)
    assert same(got, mx.array(e4m3(codes).astype(np.float32) * factor))


def test_int8_weights_with_a_scale_per_row(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(-128, 128, (12, 20)).astype(np.int8)
    scale = np.linspace(0.01, 0.1, 12, dtype=np.float32)[:, None]
    tensors = {"x.weight": ("I8", codes), "x.weight_scale": scale}
    got = open_one(tmp_path, tensors, settings("int-quantized", num_bits=8, type="int", strategy="channel"))
    assert same(got, mx.array(codes.astype(np.float32) * scale))


@pytest.mark.parametrize(
    ("tensors", "configuration", "kind", "message"),
    [
        (
            {"x.weight": np.ones((4, 4), np.float32)},
            settings("float-quantized", num_bits=8),
            CheckpointError,
            "float-quantized",
        ),
        (
            {"x.weight": ("F8_E4M3", np.ones((4, 4), np.uint8))},
            settings("float-quantized", num_bits=8),
            CheckpointError,
            "x.weight_scale is missing",
        ),
        (
            {"x.weight": np.ones((4, 4), np.float32)},
            settings("nvfp4-pack-quantized"),
            UnsupportedError,
            "nvfp4-pack-quantized",
        ),
        ({"x.weight": np.ones((4, 4), np.float32)}, settings("marlin-24"), UnsupportedError, "marlin-24"),
        (
            {"x.weight_packed": np.ones((4, 4), np.int32)},
            settings("pack-quantized", num_bits=4, type="int"),
            CheckpointError,
            "x.weight_scale is missing",
        ),
        (
            {"x.weight_packed": np.ones((4, 4), np.int32), "x.weight_scale": np.ones((4, 1), np.float32)},
            settings("pack-quantized", num_bits=3, type="int"),
            UnsupportedError,
            "int3",
        ),
        (
            {"x.weight_packed": np.ones((4, 4), np.int32), "x.weight_scale": np.ones((3, 1), np.float32)},
            settings("pack-quantized", num_bits=4, type="int"),
            CheckpointError,
            "does not fit",
        ),
        (
            {"x.weight": ("F8_E4M3", np.ones((4, 4), np.uint8)), "x.weight_scale": np.ones((1, 2), np.float32)},
            settings("float-quantized", strategy="block", block_structure="4x2"),
            CheckpointError,
            "config.json is damaged",
        ),
        (
            {"x.weight_scale": np.ones(1, np.float32)},
            settings("float-quantized"),
            CheckpointError,
            "not in the checkpoint",
        ),
    ],
)
def test_b03_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], configuration: dict[str, Any], kind: type[MlxlinError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_one(tmp_path, tensors, configuration)


@pytest.mark.parametrize("group", [32, 16], ids=["packed as MLX does", "unpacked"])
def test_a_whole_int4_model_predicts_what_its_dequantised_twin_does(tmp_path: Path, group: int) -> None:
    stored: dict[str, Any] = {}
    plain: dict[str, np.ndarray] = {}
    for name, array in weights().items():
        stored[name] = plain[name] = array
        if name.endswith(("qkv.weight", "z.weight", "up_proj.weight", "gate_proj.weight")):
            del stored[name]
            module = name.removesuffix(".weight")
            grouped = array.reshape(array.shape[0], -1, group)
            scale = np.abs(grouped).max(-1) / 7
            exact = np.array(mx.array(scale).astype(mx.bfloat16).astype(mx.float32))
            codes = np.clip(np.round(grouped / exact[..., None]), -8, 7).reshape(array.shape).astype(int)
            stored[f"{module}.weight_packed"] = pack(codes + 8, 4)
            stored[f"{module}.weight_scale"] = bf16(scale)
            stored[f"{module}.weight_shape"] = np.array(array.shape)
            value = np.repeat(exact, group, 1) * codes.astype(np.float32)
            plain[name] = value if group == 32 else np.array(mx.array(value).astype(mx.bfloat16).astype(mx.float32))
    configuration = settings(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=group, symmetric=True
    )
    save(tmp_path / "int4", stored, {**CONFIG, "quantization_config": configuration})
    expected = logits(save(tmp_path / "plain", plain))
    assert same(logits(tmp_path / "int4"), expected)
    report = convert_checkpoint(tmp_path / "int4", tmp_path / "out")
    assert same(logits(tmp_path / "out"), expected)
    assert {name for name, *_ in report.fates()} == set(stored)
    kept = {item.name: item.quantization for item in report.prepared.items}
    assert kept.get("layers.0.mixer.qkv") == (QuantSpec(4, 32) if group == 32 else None)
