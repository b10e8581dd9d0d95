"""Frozen dataclasses to plain JSON values and back, strictly: nothing unknown, missing or of another type."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from mlxlin.errors import CheckpointError


def dump(value: Any) -> Any:
    """A dataclass as dictionaries and lists; fields at their default are left out, except `kind`."""
    if dataclasses.is_dataclass(value):
        kept = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        defaults = {f.name: f.default for f in dataclasses.fields(value)}
        return {name: dump(v) for name, v in kept.items() if name == "kind" or v != defaults[name]}
    return [dump(item) for item in value] if isinstance(value, tuple) else value


def load(hint: Any, value: Any, where: str) -> Any:
    """The value of type `hint` that `dump` made `value` of; `where` names it in errors.

    Raises:
        CheckpointError: an unknown or missing field, or a value of another type.
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _load_union(options, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise CheckpointError(f"{where} of the model description must be a list.")
        return tuple(load(options[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Literal:
        fits = value in options
    elif dataclasses.is_dataclass(hint):
        return _load_dataclass(hint, value, where)
    else:
        fits = type(value) is hint or (hint is float and type(value) is int)
    if not fits:
        raise CheckpointError(f"{where} of the model description is {value!r}, expected {hint}.")
    return float(value) if hint is float else value


def _load_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    classes = [option for option in options if option is not type(None)]
    if isinstance(value, dict) and len(classes) > 1:
        classes = [option for option in classes if option.kind == value.get("kind")]
    if not classes:
        raise CheckpointError(f"{where} of the model description has unknown kind {value.get('kind')!r}.")
    return load(classes[0], value, where)


def _load_dataclass(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} of the model description must be an object.")
    hints = typing.get_type_hints(cls)
    if unknown := sorted(set(value) - set(hints)):
        raise CheckpointError(f"{where} of the model description has an unknown field '{unknown[0]}'.")
    required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(value)):
        raise CheckpointError(f"{where} of the model description lacks '{missing[0]}'.")
    return cls(**{name: load(hints[name], item, f"{where}.{name}") for name, item in value.items()})
