"""Reading a checkpoint's config.json: defaults, and refusals of keys that would change the mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlin.errors import CheckpointError, UnsupportedError

Config = Mapping[str, Any]


def need(config: Config, key: str) -> Any:
    """config[key].

    Raises:
        CheckpointError: it is not there.
    """
    if config.get(key) is None:
        raise CheckpointError(f"config.json has no '{key}'.")
    return config[key]


def given(config: Config, key: str, default: Any) -> Any:
    """config[key], or `default` where it is absent or null."""
    value = config.get(key)
    return default if value is None else value


def only(config: Config, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse values other than the `allowed` ones; an absent key is allowed.

    Raises:
        UnsupportedError: names key and value.
    """
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise UnsupportedError(
                f"config.json has {key} = {config[key]!r}, which changes the mathematics and is not supported."
            )


def default_rope(rope: Config, *, ignored: tuple[str, ...] = ()) -> None:
    """Refuse scaled rotary embeddings.

    Raises:
        UnsupportedError: names the key.
    """
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ignored}
    kind = given(rope, "rope_type", given(rope, "type", "default"))
    if kind != "default":
        raise UnsupportedError(f"config.json has rope_type = {kind!r}; only 'default' is supported.")
    if unknown := sorted(key for key in rope if key not in known and rope[key] is not None):
        raise UnsupportedError(f"config.json has an unknown rope parameter '{unknown[0]}'.")
