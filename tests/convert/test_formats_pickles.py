"""PyTorch files: read without PyTorch and without running anything in them.

`data/*.pth` were written by torch.save of PyTorch 2.13 (zip archive; stream with _use_new_zipfile_serialization=False).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.convert import convert_checkpoint
from mlxlin.convert.formats import open_checkpoint
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.loader import load_model
from tests.convert.checkpoints import CONFIG, logits, same, save, weights
from tests.models.golden import FIXTURES

DATA = Path(__file__).parent / "data"
BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


class _Storage:
    def __init__(self, key: str, array: np.ndarray) -> None:
        self.key, self.array = key, array


def save_torch(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """What torch.save writes for float32 tensors, without torch: its functions are named, not called."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    storage_type = type("FloatStorage", (), {"__module__": "torch"})
    torch.FloatStorage = storage_type  # type: ignore[attr-defined]

    def _rebuild_tensor_v2(*_: Any) -> None: ...

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]

    class Tensor:
        def __init__(self, storage: _Storage) -> None:
            self.storage = storage

        def __reduce__(self) -> Any:
            shape = self.storage.array.shape
            strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
            return _rebuild_tensor_v2, (self.storage, 0, shape, strides, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, _Storage):
                return ("storage", storage_type, value.key, "cpu", value.array.size)
            return None

    stores = {name: _Storage(str(n), array) for n, (name, array) in enumerate(tensors.items())}
    buffer = io.BytesIO()
    before = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        Pickler(buffer, protocol=2).dump({name: Tensor(store) for name, store in stores.items()})
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        for store in stores.values():
            archive.writestr(f"archive/data/{store.key}", store.array.tobytes())


@pytest.mark.parametrize("file", ["zip.pth", "stream.pth"])
def test_b12_every_kind_of_tensor_of_both_containers(file: str) -> None:
    tensors = open_checkpoint(DATA / file).tensors
    expected = {
        "a": (mx.bfloat16, BASE / 8),
        "p": (mx.float32, BASE[:2]),
        "t": (mx.float32, BASE.T),
        "row": (mx.float32, BASE[1]),
        "h": (mx.float16, BASE),
        "i": (mx.int64, np.arange(5)),
        "d": (mx.float32, BASE[:1]),
        "s": (mx.float32, np.float32(2.5)),
        "flag": (mx.bool_, np.array([True, False])),
    }
    assert set(tensors) == set(expected)
    for name, (dtype, values) in expected.items():
        got = tensors[name].read()
        assert got.dtype == dtype and got.shape == tensors[name].shape == np.shape(values)
        assert np.array_equal(np.array(got.astype(mx.float32)), np.asarray(values, np.float32)), name


def test_a_state_dict_inside_a_training_checkpoint_is_found() -> None:
    tensors = open_checkpoint(DATA / "wrapped.pth").tensors
    assert list(tensors) == ["w"] and same(tensors["w"].read(), mx.array(BASE))


def test_b12_a_model_stored_by_pytorch_only_converts(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_torch(folder / "pytorch_model.bin", weights())
    expected = logits(save(tmp_path / "safetensors", weights()))
    convert_checkpoint(folder, tmp_path / "out")
    assert same(logits(folder), expected) and same(logits(tmp_path / "out"), expected)


def test_b12_sharded_pytorch_files_are_read_by_their_index(tmp_path: Path) -> None:
    made = weights()
    names = sorted(made)
    where = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    for file in set(where.values()):
        save_torch(tmp_path / file, {name: made[name] for name in names if where[name] == file})
    assert same(logits(tmp_path), logits(save(tmp_path / "safetensors", made)))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {**where, "x": "pytorch_model-00001-of-00002.bin"}}))
    with pytest.raises(CheckpointError, match="pytorch_model-00001-of-00002.bin does not hold x, which the index says"):
        open_checkpoint(tmp_path)
    index.unlink()
    assert same(logits(tmp_path), logits(tmp_path / "safetensors")), "a whole series of shards needs no index"
    for content in (where, None):
        (tmp_path / "pytorch_model-00002-of-00002.bin").unlink(missing_ok=True)
        if content is not None:
            index.write_text(json.dumps({"weight_map": content}))
        with pytest.raises(CheckpointError, match="pytorch_model-00002-of-00002.bin is missing"):
            open_checkpoint(tmp_path)
        index.unlink(missing_ok=True)


class _Shell:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class _Getattr:
    def __reduce__(self) -> Any:
        return getattr, ({}, "clear")


@pytest.mark.parametrize("container", ["zip", "bare", "stream"])
@pytest.mark.parametrize("attack", ["shell", "getattr"])
def test_b12_a_pickle_that_calls_anything_is_refused_and_nothing_runs(
    tmp_path: Path, container: str, attack: str
) -> None:
    marker = tmp_path / "marker"
    bomb = _Shell(f"touch {marker}") if attack == "shell" else _Getattr()
    content = pickle.dumps({"w": bomb}, protocol=2)
    file = tmp_path / "pytorch_model.bin"
    if container == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", content)
    elif container == "bare":
        file.write_bytes(content)
    else:
        parts = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
        file.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts) + content)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UnsupportedError, match="system" if attack == "shell" else "getattr") as caught:
        convert_checkpoint(tmp_path, tmp_path / "out")
    assert "pytorch_model.bin" in caught.value.message and "nothing in it was run" in caught.value.message
    assert not marker.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["empty", "text", "cut pickle", "cut data", "far view"])
def test_damaged_pytorch_files_are_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "model.pth"
    if damage in ("empty", "text"):
        file.write_bytes(b"" if damage == "empty" else b"not a checkpoint at all")
    elif damage in ("cut pickle", "cut data"):
        content = (DATA / "stream.pth").read_bytes()
        file.write_bytes(content[: len(content) // 2 if damage == "cut pickle" else -20])
    else:
        save_torch(file, {"w": BASE})
        content = bytearray(file.read_bytes())
        at = content.index(b"K\x04K\x06\x86")  # the shape in the pickle: (4, 6) becomes (9, 6)
        content[at + 1] = 9
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", bytes(content[content.index(b"\x80\x02") : content.index(b"PK", 40)]))
            archive.writestr("archive/data/0", BASE.tobytes())
    with pytest.raises(CheckpointError, match="model.pth"):
        open_checkpoint(file)


_HEAD = b"".join(pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\x8e" + b"\xff" * 7 + b"\x7f.",  # bytes of more than any length
        b"\x8d" + b"\xff" * 8 + b".",  # a text of more than any length
        b"\x96" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of two thousand million places
        b"\x82\x01.",  # an extension nobody registered
        b"(" * 100_000 + b".",
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x02NQ.",  # a storage that is None
        b"\x80\x02}X\x01\x00\x00\x00a" + _REBUILD + b"(K\x01K\x02K\x03K\x04tRs.\x80\x02].",
        pickle.dumps({"a": 1}, 2) + pickle.dumps(5, 2),  # keys that are a number
        pickle.dumps({"a": 1}, 2) + pickle.dumps(["0"], 2),  # a storage nobody described
        pickle.dumps(None, 2) + pickle.dumps([], 2),
    ],
)
def test_b12_made_up_pickles_are_told_as_damage(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.pth"
    file.write_bytes(_HEAD + content)
    with pytest.raises(CheckpointError, match="model.pth"):
        open_checkpoint(file)


@pytest.mark.parametrize("damage", ["cut", "checksum", "pointer", "members"])
def test_b12_a_damaged_archive_is_named_with_its_damage(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    save_torch(file, {"w": BASE})
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "checksum":
        content[content.index(b"\x80\x02") + 12] ^= 255
    elif damage == "members":
        content = content.replace(b"archive/data/0", b"archive/other0")
    else:
        content = bytearray(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    file.write_bytes(content)
    words = {"cut": "is truncated", "checksum": "CRC", "pointer": "Git LFS pointer", "members": "outside its storage"}
    with pytest.raises(CheckpointError, match=f"pytorch_model.bin.*{words[damage]}"):
        open_checkpoint(file)


def test_several_models_in_one_folder_need_a_choice(tmp_path: Path) -> None:
    for name in ("a.pth", "b.pth"):
        save_torch(tmp_path / name, {"w": BASE})
    with pytest.raises(CheckpointError, match="a.pth, b.pth"):
        open_checkpoint(tmp_path)
    assert set(open_checkpoint(tmp_path / "b.pth").tensors) == {"w"}


@pytest.mark.parametrize("bits", [None, 8])
def test_b12_a_bare_rwkv_file_converts_without_a_config(tmp_path: Path, bits: int | None) -> None:
    """Names and layouts of BlinkDL's files, made from the checkpoint of the same model in the other spelling."""
    folder = FIXTURES / "rwkv7"
    settings = json.loads((folder / "config.json").read_text())
    source = {name: np.array(tensor.read()) for name, tensor in open_checkpoint(folder).tensors.items()}
    file = tmp_path / "rwkv7-tiny.pth"
    save_torch(file, blink(source, settings["num_hidden_layers"]))
    tokens = mx.array([[1, 5, 9, 33, 60]])
    convert_checkpoint(file, tmp_path / "out", bits=bits)
    raw, converted = (model(tokens)[0] for model in (load_model(file, bits=bits), load_model(tmp_path / "out")))
    assert raw is not None and converted is not None and same(raw, converted)
    if bits is None:
        expected, _ = load_model(save(tmp_path / "plain", source, {**settings, "fuse_norm": False}))(tokens)
        assert expected is not None and float(mx.abs(raw - expected).max()) < 1e-5


def blink(source: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    made = {"emb.weight": source["model.embeddings.weight"], "head.weight": source["lm_head.weight"]}
    for part in ("weight", "bias"):
        made[f"ln_out.{part}"] = source[f"model.norm.{part}"]
        made[f"blocks.0.ln0.{part}"] = source[f"model.layers.0.pre_norm.{part}"]
    for i in range(layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        for part in ("weight", "bias"):
            made[f"{ours}ln1.{part}"] = source[f"{theirs}attn_norm.{part}"]
            made[f"{ours}ln2.{part}"] = source[f"{theirs}ffn_norm.{part}"]
            made[f"{ours}att.ln_x.{part}"] = source[f"{theirs}attn.g_norm.{part}"]
        for name, full in {"r": "receptance", "k": "key", "v": "value", "o": "output"}.items():
            made[f"{ours}att.{full}.weight"] = source[f"{theirs}attn.{name}_proj.weight"]
        for name in ("k_k", "k_a", "r_k", *(f"x_{letter}" for letter in "rwkvag")):
            made[f"{ours}att.{name}"] = source[f"{theirs}attn.{name}"]
        for name in "wavg":
            if f"{theirs}attn.{name}_lora.lora.0.weight" not in source:
                continue
            made[f"{ours}att.{name}1"] = source[f"{theirs}attn.{name}_lora.lora.0.weight"].T
            made[f"{ours}att.{name}2"] = source[f"{theirs}attn.{name}_lora.lora.2.weight"].T
            if f"{theirs}attn.{name}_lora.lora.2.bias" in source:
                made[f"{ours}att.{name}0"] = source[f"{theirs}attn.{name}_lora.lora.2.bias"]
        made[f"{ours}ffn.x_k"] = source[f"{theirs}ffn.x_k"]
        for name in ("key", "value"):
            made[f"{ours}ffn.{name}.weight"] = source[f"{theirs}ffn.{name}.weight"]
    return {name: np.ascontiguousarray(array) for name, array in made.items()}
