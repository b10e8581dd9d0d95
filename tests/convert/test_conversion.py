"""Conversion end to end: the same numbers, the same bytes, everything accounted for, nothing overwritten or run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlin.backend import mx
from mlxlin.convert import Recipe, convert_checkpoint
from mlxlin.convert.formats import open_checkpoint
from mlxlin.convert.manifest import read_manifest
from mlxlin.errors import CheckpointError, InputError, MlxlinError, ResourceError, TokenizerError, UnsupportedError
from mlxlin.loader import load_model
from mlxlin.models import QuantSpec
from tests.convert.checkpoints import CONFIG, bf16, bytes_of, config, logits, mlx_layout, same, save, weights
from tests.models.golden import FIXTURES
from tests.tokenizer_folders import byte_level, write

FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "golden.safetensors").exists())


@pytest.mark.parametrize(
    "options", [{}, {"bits": 4}, {"bits": 3, "group_size": 32}, {"recipe": "mxfp4"}, {"recipe": "mixed-4-8"}]
)
def test_raw_and_converted_give_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    raw = save(tmp_path / "raw", {name: bf16(array) for name, array in weights().items()})
    convert_checkpoint(raw, tmp_path / "out", **options)
    expected = logits(raw, **options) if set(options) <= {"bits"} else logits(tmp_path / "out")
    assert same(logits(tmp_path / "out"), expected)
    assert same(logits(raw), expected) == (not options)


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(tmp_path / name / "x", weights(), shards=3 if name == "two" else 1)
        convert_checkpoint(tmp_path / name / "x", tmp_path / name / "out", bits=4)
    assert bytes_of(tmp_path / "one" / "out") == bytes_of(tmp_path / "two" / "out")
    text = b"".join(bytes_of(tmp_path / "one" / "out").values())
    assert str(tmp_path).encode() not in text and b"2026" not in text


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"dtype": mx.float16}], ids=str)
def test_b01_converting_twice_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    convert_checkpoint(save(tmp_path / "raw", weights()), tmp_path / "a", **options)
    convert_checkpoint(tmp_path / "a", tmp_path / "b", **options)
    report = convert_checkpoint(tmp_path / "a", tmp_path / "c")
    assert report.carried
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b") == bytes_of(tmp_path / "c")


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model"])
def test_a_tokenizer_that_cannot_be_read_ends_it_before_anything_is_written(
    tmp_path: Path, file: str, dry_run: bool
) -> None:
    raw = save(tmp_path / "raw", weights())
    write(raw, byte_level())
    (raw / file).write_bytes(b"\xff{")
    if file.endswith(".model"):
        (raw / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError) as caught:
        convert_checkpoint(raw, tmp_path / "out", dry_run=dry_run)
    assert caught.value.hint and (file in caught.value.message or "sentencepiece" in caught.value.message)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("present", [False, True])
def test_a_source_without_a_tokenizer_is_converted_and_that_is_said(tmp_path: Path, present: bool) -> None:
    raw = save(tmp_path / "raw", weights())
    if present:
        write(raw, byte_level())
    notices: list[str] = []
    report = convert_checkpoint(raw, tmp_path / "out", notice=notices.append)
    assert report.out is not None and any("no tokenizer" in text for text in notices) == (not present)


@pytest.mark.parametrize(
    "change", [{"bits": 8}, {"recipe": "mxfp8"}, {"dtype": mx.bfloat16}, {"bits": 4, "group_size": 32}], ids=str
)
def test_a_converted_folder_refuses_other_options(tmp_path: Path, change: dict[str, Any]) -> None:
    convert_checkpoint(save(tmp_path / "raw", weights()), tmp_path / "a", bits=4)
    with pytest.raises(InputError, match="a is converted already.*(quantisation|dtype)"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", **change)
    with pytest.raises(InputError, match="is the source itself"):
        convert_checkpoint(tmp_path / "a", tmp_path / "a")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("extra", [{}, {"mtp.layers.0.x": np.ones((2, 2), np.float32)}], ids=["plain", "with mtp"])
def test_b01_norms_are_shifted_once_whatever_the_layout(tmp_path: Path, extra: dict[str, np.ndarray]) -> None:
    raw = save(tmp_path / "raw", {**weights(), **extra})
    twin = save(tmp_path / "mlx", {**mlx_layout(weights()), **extra})
    expected = logits(raw)
    assert same(logits(twin), expected)
    for source in (raw, twin):
        convert_checkpoint(source, tmp_path / "a")
        convert_checkpoint(tmp_path / "a", tmp_path / "b")
        assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
        assert same(logits(tmp_path / "b"), expected)


@pytest.mark.parametrize("where", ["top", "text_config"])
@pytest.mark.parametrize("head", ["absent", "equal", "other"])
def test_b06_a_saved_head_beside_a_tied_embedding(tmp_path: Path, head: str, where: str) -> None:
    made = weights(tied=True)
    tensors = dict(made)
    if head != "absent":
        tensors["lm_head.weight"] = made["model.embed_tokens.weight"] * (1 if head == "equal" else 0.5)
    configuration = config(tie_word_embeddings=True)
    if where == "text_config":
        configuration = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": configuration}
    notices: list[str] = []
    got = logits(save(tmp_path / "x", tensors, configuration), notice=notices.append)
    untied = {**made, "lm_head.weight": tensors.get("lm_head.weight", made["model.embed_tokens.weight"])}
    assert same(got, logits(save(tmp_path / "untied", untied, config(tie_word_embeddings=False))))
    assert any("lm_head.weight differs" in text for text in notices) == (head == "other")
    report = convert_checkpoint(tmp_path / "x", dry_run=True)
    assert [name for name, _ in report.prepared.dropped] == (["lm_head.weight"] if head == "equal" else [])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_b07_multimodal_wrappers_give_their_text_part(tmp_path: Path, prefix: str) -> None:
    tensors = weights(prefix=prefix)
    if prefix == "language_model.model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    visual = "visual.patch_embed.weight" if prefix == "model." else "model.visual.patch_embed.weight"
    tensors |= {visual: np.ones((4, 4), np.float32), "vision_tower.x.weight": np.ones(3, np.float32)}
    folder = save(tmp_path / "x", tensors, {"model_type": "qwen3_5", "text_config": config(model_type="qwen3_5_text")})
    assert same(logits(folder), logits(save(tmp_path / "plain", weights())))
    report = convert_checkpoint(folder, dry_run=True)
    assert {name for name, _ in report.prepared.dropped} == {visual, "vision_tower.x.weight"}
    assert any("dropped" in text for text in report.prepared.notices)


def test_b08_prediction_heads_are_dropped_and_counted(tmp_path: Path) -> None:
    extra = {f"mtp.layers.0.w{n}": np.ones((2, 2), np.float32) for n in range(11)} | {
        "mtp.fc.weight": np.ones((2, 2), np.float32)
    }
    report = convert_checkpoint(save(tmp_path / "x", {**weights(), **extra}), tmp_path / "out")
    assert {name for name, _ in report.prepared.dropped} == set(extra)
    assert any("12" in text and "MTP" in text for text in report.prepared.notices)
    assert {name: fate for name, fate, _ in report.fates()}["mtp.fc.weight"].startswith("dropped: ")
    assert same(logits(tmp_path / "out"), logits(save(tmp_path / "plain", weights())))


def test_every_tensor_of_the_source_has_a_fate(tmp_path: Path) -> None:
    tensors = {**weights(), "mtp.fc.weight": np.ones((2, 2), np.float32)}
    report = convert_checkpoint(save(tmp_path / "x", tensors), dry_run=True, bits=4)
    assert {name for name, *_ in report.fates()} == set(tensors)
    fates = {name: fate for name, fate, _ in report.fates()}
    assert fates["model.layers.0.mlp.up_proj.weight"] == "layers.0.mlp.up, 4-bit affine, groups of 64"
    assert "groups of 32: rows of 96" in fates["model.layers.0.mlp.down_proj.weight"]
    assert fates["model.layers.0.linear_attn.A_log"] == "layers.0.mixer.A_log, float32"
    assert sum(nbytes for *_, nbytes in report.fates()) == report.nbytes


@pytest.mark.parametrize("change", ["unknown", "missing", "shape"])
def test_unknown_missing_and_misshapen_tensors_are_named(tmp_path: Path, change: str) -> None:
    tensors = weights()
    if change == "unknown":
        tensors["model.layers.1.surprise.weight"] = np.ones(3, np.float32)
    elif change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((96, 32), np.float32)
    named = "model.layers.1.surprise.weight" if change == "unknown" else "layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=named):
        convert_checkpoint(save(tmp_path / "x", tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("key", ["model_file", "auto_map"])
def test_b13_code_named_by_the_config_never_runs(tmp_path: Path, key: str) -> None:
    marker = tmp_path / "marker"
    value: Any = "x.py" if key == "model_file" else {"AutoModelForCausalLM": "x.Model"}
    folder = save(tmp_path / "m", weights(), config(**{key: value}))
    (folder / "x.py").write_text(f"open({str(marker)!r}, 'w')\nclass Model: pass\nclass ModelArgs: pass\n")
    notices: list[str] = []
    load_model(folder, notice=notices.append)
    convert_checkpoint(folder, tmp_path / "out")
    assert not marker.exists() and not (tmp_path / "out" / "x.py").exists()
    assert any("x.py" in text and "never runs" in text for text in notices)
    with pytest.raises(UnsupportedError, match="unheard_of"):
        load_model(save(tmp_path / "m", weights(), config(model_type="unheard_of", **{key: value})))
    assert not marker.exists()


def test_b15_gates_keep_eight_bits_and_the_state_stays_close(tmp_path: Path) -> None:
    made = weights()
    for name in made:
        if name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            made[name] = made[name] * 4  # beta and decay react strongly
    raw = save(tmp_path / "raw", made)
    report = convert_checkpoint(raw, tmp_path / "out", bits=4)
    stored = {item.name: item.quantization for item in report.prepared.items}
    for layer in range(3):
        for gate in ("beta", "decay"):
            spec = stored[f"layers.{layer}.mixer.{gate}"]
            assert spec is not None and spec.bits >= 8
        for vector in ("A_log", "dt_bias", "conv.weight", "norm.weight"):
            assert stored[f"layers.{layer}.mixer.{vector}"] is None
    assert "gates of the state 8-bit" in report.recipe.describe()
    tokens = mx.random.randint(0, 128, (1, 256), key=mx.random.key(0))
    exact = load_model(raw)(tokens)[1].arrays()

    def error(gate_bits: int) -> float:
        """Of the first layer's state after 256 tokens, when nothing but the gates is quantised."""
        recipe = Recipe(QuantSpec(4, 64)).with_override("*", None)
        for gate in ("*.beta", "*.decay"):
            recipe = recipe.with_override(gate, QuantSpec(gate_bits, 64))
        convert_checkpoint(raw, tmp_path / "gates", recipe=recipe)
        state = load_model(tmp_path / "gates")(tokens)[1].arrays()["layers.0.S"]
        return float(mx.linalg.norm(state - exact["layers.0.S"]) / mx.linalg.norm(exact["layers.0.S"]))

    assert error(8) < 0.01 < error(4)


@pytest.mark.parametrize("kinds", ["flla", "llfl"])
def test_b16_layer_types_are_obeyed(tmp_path: Path, kinds: str) -> None:
    names = {"f": "full_attention", "l": "linear_attention"}
    types = [names["f"], names["l"], names["l"], names["f"]] if kinds == "flla" else [names[k] for k in kinds]
    configuration = config(layer_types=types)
    del configuration["full_attention_interval"]
    report = convert_checkpoint(save(tmp_path / "x", weights(layer_types=types), configuration), tmp_path / "out")
    found = [
        "full_attention" if layer.mixer.kind == "attention" else "linear_attention"
        for layer in report.prepared.spec.layers
    ]
    assert found == types
    assert same(logits(tmp_path / "x"), logits(tmp_path / "out"))


def test_b16_layer_types_that_contradict_the_interval_are_an_error(tmp_path: Path) -> None:
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    with pytest.raises(MlxlinError, match="full_attention_interval"):
        logits(save(tmp_path / "x", weights(layer_types=types), config(layer_types=types)))


def test_dtype_narrows_matrices_and_leaves_float32_vectors(tmp_path: Path) -> None:
    convert_checkpoint(save(tmp_path / "raw", weights()), tmp_path / "out", dtype=mx.bfloat16)
    stored = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert isinstance(stored, dict)
    assert stored["layers.0.mixer.qkv.weight"].dtype == mx.bfloat16
    assert stored["layers.0.mixer.A_log"].dtype == stored["norm.weight"].dtype == mx.float32
    made = weights()
    made["lm_head.weight"][0, 0] = 1e6
    with pytest.raises(MlxlinError, match="head.weight.*float16"):
        convert_checkpoint(save(tmp_path / "raw", made), tmp_path / "half", dtype=mx.float16)
    assert not (tmp_path / "half").exists()


def test_a_number_that_is_not_finite_is_not_quantised_silently(tmp_path: Path) -> None:
    made = weights()
    made["model.layers.2.mlp.up_proj.weight"][3, 5] = np.inf
    with pytest.raises(MlxlinError, match="layers.2.mlp.up holds values that are not finite"):
        convert_checkpoint(save(tmp_path / "raw", made), tmp_path / "out", bits=4)


def test_large_models_are_split_and_load_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = save(tmp_path / "raw", weights())
    convert_checkpoint(raw, tmp_path / "one", bits=4)
    monkeypatch.setattr("mlxlin.convert.writer.shard.__defaults__", (30_000,))
    convert_checkpoint(raw, tmp_path / "many", bits=4)
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3 and all(path.stat().st_size < 40_000 for path in (tmp_path / "many").glob("*.safetensors"))
    assert same(logits(tmp_path / "one"), logits(tmp_path / "many"))
    (tmp_path / "many" / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=shards[1]):
        logits(tmp_path / "many")


def test_side_files_and_provenance_are_carried(tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--model" / "snapshots" / ("a" * 40)
    write(save(cache, weights()), byte_level())
    for name, text in {"chat_template.jinja": "x", "rwkv_vocab_v20230424.txt": "1"}.items():
        (cache / name).write_text(text)
    (cache / "additional_chat_templates").mkdir()
    (cache / "additional_chat_templates" / "tool.jinja").write_text("y")
    (cache / "modeling.py").write_text("raise SystemExit")
    convert_checkpoint(cache, tmp_path / "out")
    files = bytes_of(tmp_path / "out")
    assert set(files) == {
        "README.md",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "mlxlin.json",
        "model.safetensors",
        "rwkv_vocab_v20230424.txt",
        "tokenizer.json",
    }
    assert read_manifest(tmp_path / "out").source == {
        "repo": "owner/model",
        "revision": "a" * 40,
        "format": "safetensors",
    }
    assert b"owner/model" in files["README.md"]


@pytest.mark.parametrize(("number", "hint"), [(0, "Convert again from owner/model"), (99, "Update mlxlin")])
def test_a_folder_of_another_format_says_what_to_do(tmp_path: Path, number: int, hint: str) -> None:
    convert_checkpoint(save(tmp_path / "raw", weights()), tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "mlxlin.json").read_text())
    manifest |= {"format": number, "source": {"repo": "owner/model"}}
    (tmp_path / "a" / "mlxlin.json").write_text(json.dumps(manifest))
    for action in (lambda: logits(tmp_path / "a"), lambda: convert_checkpoint(tmp_path / "a", tmp_path / "b")):
        with pytest.raises(CheckpointError, match=f"format {number}") as caught:
            action()
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [{"source": 5}, {"options": None}, {"options": {}}, {"options": {"recipe": 5, "dtype": None}}, {"files": [1]}]
    + [{"files": {"../raw/config.json": "0"}}, {"files": {"/etc/hostname": "0"}}]
    + [{"quantization": [{"bits": "x", "matrices": ["embed"]}]}, {"model": "x"}, {"quantization": 5}],
    ids=str,
)
def test_a_manifest_of_the_wrong_kinds_is_told_as_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    convert_checkpoint(save(tmp_path / "raw", weights()), tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "mlxlin.json").read_text())
    (tmp_path / "a" / "mlxlin.json").write_text(json.dumps({**manifest, **change}))
    for options in ({}, {"bits": 4}, {"dtype": mx.float16}):
        with pytest.raises(CheckpointError, match="a/mlxlin.json is damaged"):
            convert_checkpoint(tmp_path / "a", dry_run=True, **options)


@pytest.mark.parametrize("damage", ["byte", "file", "parameter", "json"])
def test_a_damaged_converted_folder_is_noticed(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "a"
    convert_checkpoint(save(tmp_path / "raw", weights()), folder)
    if damage == "byte":
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-5] ^= 1
        (folder / "model.safetensors").write_bytes(content)
    elif damage == "file":
        (folder / "config.json").unlink()
    elif damage == "parameter":
        manifest = (folder / "mlxlin.json").read_text()
        (folder / "mlxlin.json").write_text(manifest.replace('"width": 64', '"width": 32'))
    else:
        (folder / "mlxlin.json").write_text('{"format": 1}')
    with pytest.raises(CheckpointError):
        convert_checkpoint(folder, tmp_path / "b")
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob(".*"))


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    raw = save(tmp_path / "raw", weights())
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="was not written by mlxlin"):
        convert_checkpoint(raw, other)
    with pytest.raises(InputError, match="is a file"):
        convert_checkpoint(raw, other / "thesis.txt")
    with pytest.raises(InputError, match="was not written by mlxlin"):
        convert_checkpoint(raw, raw)
    assert (other / "thesis.txt").read_text() == "years of work"
    empty = tmp_path / "empty"
    empty.mkdir()
    convert_checkpoint(raw, empty)
    convert_checkpoint(raw, empty, bits=4)  # ours: replaced
    assert read_manifest(empty).options["recipe"]["bits"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"raw", "other", "empty"}
    (empty / ".DS_Store").write_text("")
    convert_checkpoint(raw, empty)
    (empty / "notes.txt").write_text("kept")
    with pytest.raises(InputError, match="holds notes.txt, which mlxlin did not write"):
        convert_checkpoint(raw, empty, bits=4)
    (empty / "notes.txt").unlink()
    (empty / "mlxlin.json").write_text("{")
    with pytest.raises(InputError, match="mlxlin.json is damaged"):
        convert_checkpoint(raw, empty, bits=4)
    assert (empty / "model.safetensors").exists()


def test_free_disk_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match=r"[4-9]\.\d MB will be written, but only 0.0 MB are free"):
        convert_checkpoint(save(tmp_path / "raw", weights()), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"raw"}


def test_a_dry_run_writes_nothing_and_tells_the_size(tmp_path: Path) -> None:
    raw = save(tmp_path / "raw", weights())
    report = convert_checkpoint(raw, tmp_path / "out", bits=4, dry_run=True)
    assert {path.name for path in tmp_path.iterdir()} == {"raw"}
    written = convert_checkpoint(raw, tmp_path / "out", bits=4)
    tensors = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert isinstance(tensors, dict)
    assert report.nbytes == written.nbytes == sum(array.nbytes for array in tensors.values())
    assert sum(nbytes for _, _, nbytes in report.kinds()) == report.nbytes
    assert CONFIG["vocab_size"] == report.prepared.spec.vocab


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_same_bits_raw_and_converted(tmp_path: Path, name: str, bits: int | None) -> None:
    raw, tokens = FIXTURES / name, mx.array([[1, 5, 9, 33, 60, 2, 2, 41]])
    report = convert_checkpoint(raw, tmp_path / "out", bits=bits)
    expected, result = (model(tokens)[0] for model in (load_model(raw, bits=bits), load_model(tmp_path / "out")))
    assert expected is not None and result is not None and same(expected, result)
    stored = open_checkpoint(raw).tensors
    assert {tensor for tensor, *_ in report.fates()} == set(stored)
