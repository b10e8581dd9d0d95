"""Safetensors files and folders: complete and intact, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlxlin.convert.formats import open_checkpoint
from mlxlin.convert.formats.tensor import DTYPES
from mlxlin.errors import CheckpointError, UnsupportedError
from tests.convert.checkpoints import CONFIG, logits, same, save, save_safetensors, weights


def test_a_sharded_checkpoint_equals_the_single_file(tmp_path: Path) -> None:
    one = save(tmp_path / "one", weights())
    three = save(tmp_path / "three", weights(), shards=3)
    assert same(logits(one), logits(three))


def test_shards_without_an_index_are_found_by_their_names(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", weights(), shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert same(logits(folder), logits(save(tmp_path / "one", weights())))


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path: Path, index: bool) -> None:
    folder = save(tmp_path / "x", weights(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.6, -1], ids=str)
def test_a_truncated_shard_is_named(tmp_path: Path, keep: float) -> None:
    folder = save(tmp_path / "x", weights(), shards=2)
    file = folder / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors is truncated"):
        open_checkpoint(folder)


def test_a_tensor_that_the_index_promises_but_the_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", weights(), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="does not hold model.extra.weight"):
        open_checkpoint(folder)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", weights(), shards=2)
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + b"x" * 100, "not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "damaged safetensors header"),
        (b"\x05\0\0\0\0\0\0\0{nope", "damaged safetensors header"),
        (b'\x0e\0\0\0\0\0\0\0{"a":{"x":12}}', "damaged safetensors header"),
    ],
)
def test_what_is_not_a_safetensors_file_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_bytes_that_do_not_match_the_shapes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_safetensors(file, {"a": np.zeros((4, 4), np.float32), "b": np.zeros(3, np.float32)})
    good = file.read_bytes()
    file.write_bytes(good + b"\0" * 7)
    with pytest.raises(CheckpointError, match="7 bytes more"):
        open_checkpoint(tmp_path)
    file.write_bytes(good.replace(b"[4, 4]", b"[4, 5]"))
    with pytest.raises(CheckpointError, match="tensor a do not match its shape"):
        open_checkpoint(tmp_path)
    file.write_bytes(good.replace(b'"F32"', b'"F3X"', 1))
    with pytest.raises(UnsupportedError, match="tensor a has dtype F3X"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("foreign", [False, True], ids=["plain", "beside a dtype MLX cannot read"])
@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith("F8")])
def test_every_dtype_keeps_its_values(tmp_path: Path, name: str, foreign: bool) -> None:
    kinds = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "BOOL": "u1"}
    width = DTYPES[name][0]
    kind = np.dtype("<" + kinds.get(name, f"{'u' if name[0] == 'U' else 'i'}{width}"))
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(kind) * (0x3F80 if name == "BF16" else 1)
    tensors: dict[str, object] = {"x": (name, values), "empty": (name, np.zeros((0, 2), kind))}
    if foreign:
        tensors["other"] = ("F64", np.zeros(1))
    save_safetensors(tmp_path / "model.safetensors", tensors)  # type: ignore[arg-type]
    opened = open_checkpoint(tmp_path).tensors
    assert opened["x"].read().tolist() == [[0, 1, 1], [1, 0, 1]]
    assert opened["x"].read().dtype == DTYPES[opened["x"].dtype][1]  # a second reading gives the same
    assert opened["empty"].read().shape == (0, 2)


@pytest.mark.parametrize(
    ("file", "form"),
    [("model.gguf", "GGUF"), ("model.onnx", "ONNX"), ("tf_model.h5", "TensorFlow"), ("flax_model.msgpack", "Flax")],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, file: str, form: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(UnsupportedError, match=form) as caught:
            open_checkpoint(path)
        assert file in caught.value.message and "safetensors" in caught.value.hint


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "mxfp4"])
def test_other_quantisations_are_refused_by_name(tmp_path: Path, method: str) -> None:
    save(tmp_path, weights(), {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}})
    with pytest.raises(UnsupportedError, match=f"'{method}'"):
        open_checkpoint(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "x", weights())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "model.safetensors")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match="cannot be read.*Permission denied"):
        open_checkpoint(folder)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(tmp_path)
