"""Every key of every family's config.json with every kind of wrong value: refused by name, or of no effect."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlxlin.errors import CheckpointError, MlxlinError
from mlxlin.models import ModelSpec, find
from mlxlin.models.config import Config, given, need
from tests.models.golden import FIXTURES

CONFIGS = {path.parent.name: json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*/config.json"))}
ABSENT = object()
WRONG: dict[type, tuple[Any, ...]] = {
    int: ("x", {"a": 1}, [[1]], 1.5, -1, 10**12, 10**400),
    float: ("x", {"a": 1}, [[1]], float("nan"), float("inf"), 10**400),
    bool: ("x", {"a": 1}, [[1]], 2, -1),
    str: (5, {"a": 1}, [[1]], "x"),
    list: ("x", 5, 0.5),
    dict: ("x", 5, 0.5),
}
ABSURD = (ABSENT, None, 0, 1, 3, 0.5, 10**9, True, False, "", [], {}, [1, 2], ["x"], "x", {"a": 1})


def keys(config: Config, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*outer, key)
        if isinstance(value, dict):
            yield from keys(value, (*outer, key))


def changed(config: Config, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if value is ABSENT:
        del place[path[-1]]
    return result


def described(config: Config) -> ModelSpec:
    return find(config).spec(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_value_of_the_wrong_kind_is_refused_by_name_or_never_read(name: str) -> None:
    config = CONFIGS[name]
    right = described(config)
    for path in keys(config):
        original = config
        for key in path:
            original = original[key]
        for wrong in WRONG.get(type(original), ()):
            if path[-1].startswith("expand") and wrong in (1.5, 10**12):
                continue  # factors; what they make of a size is compared with the tensors
            try:
                assert described(changed(config, path, wrong)) == right, (path, wrong)
            except MlxlinError as error:
                assert path[-1] in error.message, (path, wrong, error.message)
                assert len(error.message) < 250


@pytest.mark.parametrize("name", [name for name in CONFIGS if "-" not in name])
def test_an_absurd_or_missing_value_gives_a_sound_description_or_an_error(name: str) -> None:
    config, found = CONFIGS[name], set()
    for path in keys(config):
        for value in ABSURD:
            try:
                found.add(described(changed(config, path, value)))
            except MlxlinError as error:
                assert "config.json" in error.message or "model_type" in error.message
    for spec in found:
        assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("key", ["", None, 5, [], {}])
def test_a_config_without_a_model_type_is_no_model(key: Any) -> None:
    with pytest.raises(MlxlinError):
        find({"model_type": key})


def test_kinds_follow_the_default() -> None:
    config = {"whole": 4.0, "switch": 1, "null": None, "share": 1, "list": [1, 2.0], "no": 0}
    assert need(config, "whole") == 4 and isinstance(need(config, "whole"), int)
    assert given(config, "switch", False) is True
    assert given(config, "null", 7) == given(config, "absent", 7) == 7
    assert isinstance(given(config, "share", 0.5), float)
    assert given(config, "list", [], list[int]) == [1, 2]
    assert given(config, "no", 0) == given(config, "no", 5, zero=True) == 0
    for read in (lambda: given(config, "no", 5), lambda: need(config, "no"), lambda: need(config, "absent")):
        with pytest.raises(CheckpointError, match="'absent'|no = 0"):
            read()
