"""JSON files of a model, damaged in ways that the parser itself does not survive, or that are of the wrong kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mlxlin
from mlxlin import archive
from mlxlin.convert.formats.safetensors import parse_header
from mlxlin.convert.recipe import make_recipe

DEEP = "[" * 200_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(Path(mlxlin.__file__).parent / "demo", folder)
    return folder


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_nested_without_end_is_an_error_that_names_it(model: Path, name: str) -> None:
    (model / name).write_text(DEEP)
    with pytest.raises(mlxlin.MlxlinError, match=name):
        mlxlin.load(model)


def test_headers_indexes_recipes_and_sessions_nested_without_end(model: Path, tmp_path: Path) -> None:
    deep = tmp_path / "deep.safetensors"
    deep.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    (tmp_path / "recipe.json").write_text(DEEP)
    shutil.copy(deep, model / "model.safetensors")
    with pytest.raises(mlxlin.MlxlinError, match="model.safetensors"):
        mlxlin.load(model)
    with pytest.raises(mlxlin.MlxlinError, match="recipe.json"):
        make_recipe(recipe=tmp_path / "recipe.json")
    with pytest.raises(mlxlin.MlxlinError, match="deep"):
        archive.read(deep)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(DEEP)
    with pytest.raises(mlxlin.MlxlinError, match="index"):
        mlxlin.load(model)


@pytest.mark.parametrize("value", [{}, [[]], [{}, 2], "x", None, True])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_stop_tokens_that_are_no_numbers_are_none(model: Path, name: str, value: Any) -> None:
    data = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps(data | {"eos_token_id": value}))
    stops = mlxlin.Tokenizer.from_folder(model).stop_ids
    assert stops and all(type(stop) is int for stop in stops)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": ["a", "b"]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": 5, "shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_a_header_with_values_of_the_wrong_kind_is_damaged(entry: dict[str, Any]) -> None:
    good = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
    text = json.dumps({"a": entry, "b": good}).encode()
    with pytest.raises(mlxlin.errors.CheckpointError, match="x has a damaged safetensors header"):
        parse_header(text, 16 + len(text), "x")
