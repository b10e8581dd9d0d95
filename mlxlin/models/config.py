"""Reading a checkpoint's config.json: kinds of values, defaults, refusals of what would change the mathematics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import GenericAlias
from typing import Any, get_args, get_origin

from mlxlin.errors import CheckpointError, UnsupportedError

Config = Mapping[str, Any]
Kind = type | GenericAlias

_MOST, _MOST_THINGS = 2**31 - 1, 2**16  # of any whole number; of layers, heads or experts: keys that begin with num_
_HUGE = 1e30
_WORDS = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
_HINT = "The file is damaged or incomplete; compare it with the original."


def need(config: Config, key: str, kind: Kind = int) -> Any:
    """config[key], of the given kind: int, float, bool, str, dict, list, or list[int] and so on; numbers are above 0.

    Raises:
        CheckpointError: it is not there, or of another kind.
    """
    if config.get(key) is None:
        raise CheckpointError(f"config.json has no '{key}'.", hint=_HINT)
    return _checked(key, config[key], kind, positive=True)


def given(config: Config, key: str, default: Any, kind: Kind | None = None, *, zero: bool = False) -> Any:
    """config[key], or `default` where it is absent or null.

    Args:
        default: says also what kind of value is allowed, and that it is above 0 where the default is.
        kind: what is allowed, where it is not the default's.
        zero: allow 0 beside a default above 0.

    Raises:
        CheckpointError: it is of another kind.
    """
    if config.get(key) is None:
        return default
    positive = (kind is int if default is None else type(default) in (int, float) and default > 0) and not zero
    return _checked(key, config[key], kind or type(default), positive)


def _checked(key: str, value: Any, kind: Any, positive: bool) -> Any:
    """`value`, if it is of `kind`; 4.0 is a whole number too, 1 is true, and whole numbers are never below 0."""
    if get_origin(kind) is list:
        items = enumerate(_checked(key, value, list, positive))
        return [_checked(f"{key}[{index}]", item, get_args(kind)[0], False) for index, item in items]
    if kind in (int, float):
        most = _MOST_THINGS if key.startswith("num_") else _MOST
        fits = type(value) in (int, float) and abs(value) < _HUGE and (value > 0 or not positive)
        fits = fits and (kind is float or (value == int(value) and 0 <= value <= most))
        bounds = f" from {int(positive)} to {most:,}" if kind is int else " above 0" if positive else ""
        words = f"a {'whole ' if kind is int else ''}number{bounds}"
    else:
        kind = get_origin(kind) or kind
        fits, words = isinstance(value, kind) or (kind is bool and value in (0, 1)), _WORDS[kind]
    if not fits:
        raise CheckpointError(f"config.json has {key} = {short(value)}, where {words} belongs.", hint=_HINT)
    return kind(value)


def short(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nullable(config: Config, key: str, absent: Any, *, zero: bool = False) -> Any:
    """config[key], of the same kind as `absent`; None where it is null, which here means something else than absent."""
    return given(config, key, None, type(absent), zero=zero) if key in config else absent


def either(config: Config, one: str, other: str, default: Any = None) -> Any:
    """The value of a key with two spellings; must be there, a whole number, where there is no default."""
    key = other if config.get(one) is None and config.get(other) is not None else one
    return need(config, key) if default is None else given(config, key, default)


def only(config: Config, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse values other than the `allowed` ones; an absent key is allowed.

    Raises:
        UnsupportedError: names key and value.
    """
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise UnsupportedError(
                f"config.json has {key} = {short(config[key])}, which changes the mathematics and is not supported."
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


def rotary_size(config: Config, head_dim: int, share: float) -> int:
    """How many of a head's channels are turned: `share` of them, or what `partial_rotary_factor` says.

    Raises:
        CheckpointError: none, an odd number, or more than there are.
    """
    share = given(config, "partial_rotary_factor", share)
    dims = int(head_dim * share)
    if dims % 2 or not 0 < dims <= head_dim:
        raise CheckpointError(f"config.json: partial_rotary_factor {share:g} turns {dims} of {head_dim} channels.")
    return dims


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
    kinds = need(config, key, list[str]) if derived is None else given(config, key, list(derived), list[str])
    if len(kinds) != count or not set(kinds) <= set(names):
        raise CheckpointError(f"config.json: {key} must name {names[0]} or {names[1]} {count} times.")
    return list(kinds)
