"""FP8 checkpoints with block scales, and what is wrong with them when something is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.convert import convert_checkpoint
from mlxlin.convert.formats import open_checkpoint
from mlxlin.errors import CheckpointError, MlxlinError, NumericsError, UnsupportedError
from tests.convert.checkpoints import CONFIG, logits, same, save, save_safetensors, weights

SETTINGS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def e4m3(codes: np.ndarray) -> np.ndarray:
    """The numbers behind e4m3fn bytes: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    return sign * np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    )


def encode(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 bytes of a matrix and one float32 scale per 128 x 128 block."""
    rows, cols = (-(-n // 128) for n in matrix.shape)
    scale = np.zeros((rows, cols), np.float32)
    codes = np.zeros(matrix.shape, np.uint8)
    for i in range(rows):
        for j in range(cols):
            block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            scale[i, j] = np.abs(matrix[block]).max() / 448
            codes[block] = np.array(mx.to_fp8(mx.array(matrix[block] / scale[i, j])))
    return codes, scale


def one_linear(
    folder: Path, scale: Any, settings: dict[str, Any] = SETTINGS, shape: tuple[int, int] = (300, 200)
) -> np.ndarray:
    """Write the case's single matrix; its bytes."""
    codes = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 127) == 127] = 1  # no NaN
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    tensors: dict[str, Any] = {"x.weight": ("F8_E4M3", codes)}
    if scale is not None:
        tensors["x.weight_scale_inv"] = scale
    save_safetensors(folder / "model.safetensors", tensors)
    return codes


def bf16_scale() -> tuple[np.ndarray, tuple[str, np.ndarray]]:
    scale = mx.random.uniform(0.001, 0.1, (3, 2), key=mx.random.key(1)).astype(mx.bfloat16)
    return np.array(scale.astype(mx.float32)), ("BF16", np.array(scale.view(mx.uint16)))


@pytest.mark.parametrize(
    "fmt", [SETTINGS, {k: v for k, v in SETTINGS.items() if k != "fmt"}], ids=["e4m3", "b04_absent"]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_b02_b04_blocks_and_ragged_edges_equal_the_reference(
    tmp_path: Path, fmt: dict[str, Any], dtype: mx.Dtype
) -> None:
    scale, stored = bf16_scale()
    codes = one_linear(tmp_path, stored, fmt)
    factor = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:300, :200]
    expected = mx.array(e4m3(codes).astype(np.float32) * factor).astype(dtype)
    tensor = open_checkpoint(tmp_path, dtype).tensors["x.weight"]
    assert tensor.shape == (300, 200) and same(tensor.read(), expected)


def test_b02_many_bands_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stored = bf16_scale()
    one_linear(tmp_path, stored)
    whole = open_checkpoint(tmp_path).tensors["x.weight"].read()
    monkeypatch.setattr("mlxlin.convert.formats.fp8._BAND", 7 * 200)
    assert same(open_checkpoint(tmp_path).tensors["x.weight"].read(), whole)


def test_power_of_two_scales_and_stacked_experts(tmp_path: Path) -> None:
    codes = np.random.default_rng(2).integers(0, 120, (2, 130, 140)).astype(np.uint8)
    exponents = np.array([[[120, 127], [130, 126]], [[119, 118], [127, 125]]], np.uint8)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": SETTINGS}))
    tensors = {"x.up_proj": ("F8_E4M3", codes), "x.up_proj_scale_inv": ("F8_E8M0", exponents)}
    save_safetensors(tmp_path / "model.safetensors", tensors)
    factor = np.repeat(np.repeat(2.0 ** (exponents.astype(int) - 127.0), 128, 1), 128, 2)[:, :130, :140]
    got = open_checkpoint(tmp_path, mx.float32).tensors["x.up_proj"].read()
    assert same(got, mx.array((e4m3(codes) * factor).astype(np.float32)))


@pytest.mark.parametrize(
    "scale", [np.float32(0.5).reshape(()), np.full((1,), 0.5, np.float32), np.full((300, 1), 0.5, np.float32)]
)
def test_a_scale_per_tensor_or_row(tmp_path: Path, scale: np.ndarray) -> None:
    codes = one_linear(tmp_path, scale, {"quant_method": "fp8", "weight_block_size": None})
    got = open_checkpoint(tmp_path, mx.float32).tensors["x.weight"].read()
    assert same(got, mx.array((e4m3(codes) * 0.5).astype(np.float32)))


@pytest.mark.parametrize(
    ("scale", "changes", "kind", "message"),
    [
        (None, {}, CheckpointError, "x.weight is stored as FP8, but its scale x.weight_scale_inv is missing"),
        (np.ones((3, 2), np.float32), {"weight_block_size": [64, 64]}, UnsupportedError, r"\[64, 64\]"),
        (np.ones((3, 2), np.float32), {"weight_block_size": [1, 128]}, UnsupportedError, r"\[1, 128\]"),
        (np.ones((3, 2), np.float32), {"fmt": "e5m2"}, UnsupportedError, "e5m2"),
        (np.ones((2, 2), np.float32), {}, CheckpointError, r"x.weight .*shape \(2, 2\), which does not fit blocks"),
        (np.ones((3, 2), np.float32), {"weight_block_size": None}, CheckpointError, "one scale per tensor or row"),
    ],
)
def test_b02_what_does_not_fit_is_named(
    tmp_path: Path, scale: Any, changes: dict[str, Any], kind: type[MlxlinError], message: str
) -> None:
    one_linear(tmp_path, scale, {**SETTINGS, **changes})
    with pytest.raises(kind, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("fmt", [{}, {"fmt": "e5m2"}], ids=["said to be e4m3", "e5m2"])
def test_b02_another_number_format_of_the_tensor_is_named(tmp_path: Path, fmt: dict[str, str]) -> None:
    scale = np.ones((2, 1), np.float32)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {**SETTINGS, **fmt}}))
    tensors = {"x.weight": ("F8_E5M2", np.ones((200, 100), np.uint8)), "x.weight_scale_inv": scale}
    save_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(UnsupportedError, match="x.weight has dtype F8_E5M2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "damage", [5, "fp8", {"quant_method": "fp8", "weight_block_size": 128}, {"quant_method": "fp8", "fmt": ["e4m3"]}]
)
def test_b04_a_description_of_the_wrong_kind_is_told(tmp_path: Path, damage: Any) -> None:
    one_linear(tmp_path, np.ones((3, 2), np.float32), damage)
    with pytest.raises((CheckpointError, UnsupportedError), match=r"config.json is damaged|format '\['e4m3'\]'"):
        open_checkpoint(tmp_path)


def test_a_scale_without_its_weight_and_fp8_without_a_description_are_named(tmp_path: Path) -> None:
    one_linear(tmp_path, None, {})
    with pytest.raises(CheckpointError, match="x.weight is stored as F8_E4M3, but nothing"):
        open_checkpoint(tmp_path)
    save_safetensors(tmp_path / "model.safetensors", {"y.weight_scale_inv": np.ones((1, 1), np.float32)})
    with pytest.raises(CheckpointError, match="y.weight_scale_inv is the scale of an FP8 tensor that is not"):
        open_checkpoint(tmp_path)


def fp8_model(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The tiny model with its projections in FP8 (the checkpoint), and the same numbers as bfloat16 values."""
    stored: dict[str, Any] = {}
    plain: dict[str, np.ndarray] = {}
    for name, array in weights().items():
        stored[name] = plain[name] = array
        if name.endswith(("qkv.weight", "z.weight", "out_proj.weight", "up_proj.weight", "q_proj.weight")):
            codes, scale = encode(array)
            stored[name], stored[name + "_scale_inv"] = ("F8_E4M3", codes), scale
            factor = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: array.shape[0], : array.shape[1]]
            value = mx.array(e4m3(codes).astype(np.float32) * factor).astype(mx.bfloat16)
            plain[name] = np.array(value.astype(mx.float32))
    stored["model.layers.0.mlp.up_proj.input_scale"] = np.ones(1, np.float32)
    save(folder, stored, {**CONFIG, "quantization_config": SETTINGS})
    return stored, plain


def test_b02_a_whole_fp8_model_predicts_what_its_dequantised_twin_does(tmp_path: Path) -> None:
    stored, plain = fp8_model(tmp_path / "fp8")
    notices: list[str] = []
    assert same(logits(tmp_path / "fp8", notice=notices.append), logits(save(tmp_path / "plain", plain)))
    fates = convert_checkpoint(tmp_path / "fp8", dry_run=True).fates()
    assert {name for name, *_ in fates} == set(stored)
    source = open_checkpoint(tmp_path / "fp8")
    assert source.format == "fp8"
    assert source.dropped == (
        ("model.layers.0.mlp.up_proj.input_scale", "scale of FP8 activations; mlxlin computes in floats"),
    )


def test_b02_numbers_beyond_float16_are_not_made_infinite(tmp_path: Path) -> None:
    stored, plain = fp8_model(tmp_path / "fp8")
    convert_checkpoint(tmp_path / "fp8", tmp_path / "half", dtype=mx.float16)
    assert same(logits(tmp_path / "half"), logits(save(tmp_path / "plain", half(stored, plain))))
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    save(tmp_path / "fp8", {**stored, name: stored[name] * 1e6}, {**CONFIG, "quantization_config": SETTINGS})
    with pytest.raises(NumericsError, match="layers.1.mlp.up.weight holds values beyond the range of float16"):
        convert_checkpoint(tmp_path / "fp8", tmp_path / "out", dtype=mx.float16)


def half(stored: dict[str, Any], plain: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The dequantised twin with its matrices rounded to float16, once."""
    made = {name: array.astype(np.float16) if array.ndim == 2 else array for name, array in plain.items()}
    for name in plain:
        if isinstance(stored[name], tuple):
            scale = stored[name + "_scale_inv"]
            shape = stored[name][1].shape
            factor = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: shape[0], : shape[1]]
            made[name] = (e4m3(stored[name][1]).astype(np.float32) * factor).astype(np.float16)
    return made
