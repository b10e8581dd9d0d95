"""Reading a checkpoint's config.json: defaults, and refusals of keys that would change the mathematics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def rope_settings(config: Config, default_base: float, *, ignored: tuple[str, ...] = ()) -> tuple[Config, float]:
    """Settings of rotary embeddings and their base, from `rope_parameters` or, in older configs, the keys it replaced.

    Raises:
        UnsupportedError: they are scaled; names the key.
    """
    rope = given(config, "rope_parameters", given(config, "rope_scaling", {}))
    default_rope(rope, ignored=ignored)
    return rope, float(given(rope, "rope_theta", given(config, "rope_theta", default_base)))


def layer_kinds(
    config: Config,
    derived: Sequence[str] | None,
    names: tuple[str, str] = ("linear_attention", "full_attention"),
    key: str = "layer_types",
) -> list[str]:
    """One of the two `names` for each layer: config[key], or what was `derived` from other keys.

    Raises:
        CheckpointError: the list does not fit, or there is none.
    """
    count = need(config, "num_hidden_layers")
    kinds = need(config, key) if derived is None else given(config, key, list(derived))
    if len(kinds) != count or not set(kinds) <= set(names):
        raise CheckpointError(f"config.json: {key} must name {names[0]} or {names[1]} {count} times.")
    return list(kinds)
