"""Recipes: which matrix is stored with how many bits.

Recurrent models carry the error of what decides over their state (decay, beta, routers, low-rank factors: the role
"gate") from token to token, so that stays at 8 bits or more whatever the rest gets; vectors, norms and convolutions are
never quantised. Gates behind the state are projections like others: on the shipped model 8 bits for them gain what 8
bits for the output projections do, byte for byte.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxlin.errors import InputError, UnsupportedError
from mlxlin.models.params import QuantSpec, Role

from .formats.mlx_quantized import MODES, check_spec, read_spec

GATE_BITS = 8
_MIXED = re.compile(r"mixed-([234568])-([34568])$")
# more bits, in a mixed recipe, for what every token passes and what writes into the residual stream
_MIXED_MATCH = ("embed", "head", "*.out", "*.down")
_LISTED = 6  # exceptions told one by one; more are counted
_FIELDS = {"bits", "group_size", "mode", "gate_bits", "overrides"}


@dataclass(frozen=True)
class Override:
    """Matrices whose name matches the shell pattern `match` get `spec`; None keeps them as they are."""

    match: str
    spec: QuantSpec | None


@dataclass(frozen=True)
class Recipe:
    """How to quantise a model.

    Attributes:
        base: for projections, embedding and head; None leaves the model unquantised.
        gate: for gates; never fewer than 8 bits unless an override says so.
        overrides: exceptions by name; the last match wins.
        target_kl: of a request: bits are to be added until this close to the source (`target.recipe_for`).
        request: of a recipe that was raised: what was asked for.
    """

    base: QuantSpec | None = None
    gate: QuantSpec = QuantSpec(GATE_BITS, 64)
    overrides: tuple[Override, ...] = ()
    target_kl: float | None = None
    request: Recipe | None = None

    def choose(self, name: str, shape: tuple[int, ...], role: Role) -> tuple[QuantSpec | None, str]:
        """How to store a matrix, and why where that is not what was asked for.

        Args:
            name: of the matrix, without `.weight`.
            shape: [..., out, in].
            role: as `models.params.Role`.
        """
        if self.base is None or role == "keep" or len(shape) < 2:
            return None, ""
        spec: QuantSpec | None = self.gate if role == "gate" else self.base
        for override in self.overrides:
            if fnmatch.fnmatchcase(name, override.match):
                spec = override.spec
        return (None, "") if spec is None else _fitting(spec, shape[-1])

    def with_override(self, match: str, spec: QuantSpec | None) -> Recipe:
        """The same recipe with one more exception."""
        kept = tuple(o for o in self.overrides if o.match != match)
        return replace(self, overrides=(*kept, Override(match, spec)))

    def to_json(self) -> dict[str, Any] | None:
        """Plain values; None for an unquantised model."""
        if self.base is None:
            return None
        overrides = [{"match": o.match, **(spec_json(o.spec) if o.spec else {"bits": None})} for o in self.overrides]
        data = {**spec_json(self.base), "gate": spec_json(self.gate), "overrides": overrides}
        if self.target_kl is not None:
            data["target_kl"] = self.target_kl
        if self.request is not None:
            data["request"] = self.request.to_json()
        return data

    def gave(self, recorded: Mapping[str, Any] | None) -> bool:
        """Whether a recorded recipe is this one, or was raised from this request."""
        return self.to_json() in (recorded, (recorded or {}).get("request"))

    def describe(self) -> str:
        """In words, e.g. "4-bit affine, groups of 64; gates of the state 8-bit affine"."""
        if self.base is None:
            return "not quantised"
        text = f"{describe_spec(self.base)}; gates of the state {describe_spec(self.gate)}; vectors as they are"
        if len(self.overrides) <= _LISTED:
            exceptions = [f"{o.match} {_form(o.spec)}" for o in self.overrides]
        else:
            counts = Counter(_form(override.spec) for override in self.overrides)
            exceptions = [f"{count} matrices {form}" for form, count in sorted(counts.items())]
        if self.request is not None:
            exceptions.append(f"raised to stay within {self.request.target_kl:g} nats of the source")
        return "; ".join([text, *exceptions])


def _form(spec: QuantSpec | None) -> str:
    return "as they are" if spec is None else describe_spec(spec)


def spec_json(spec: QuantSpec) -> dict[str, Any]:
    return {"bits": spec.bits, "group_size": spec.group_size, "mode": spec.mode}


def describe_spec(spec: QuantSpec) -> str:
    """In words: "4-bit affine, groups of 64"."""
    return f"{spec.bits}-bit affine, groups of {spec.group_size}" if spec.mode == "affine" else spec.mode


def _fitting(spec: QuantSpec, columns: int) -> tuple[QuantSpec | None, str]:
    """`spec` with the largest group size not above its own that divides a row; None when there is none."""
    for group in sorted(MODES[spec.mode][1], reverse=True):
        if group <= spec.group_size and columns % group == 0:
            reason = (
                "" if group == spec.group_size else f"groups of {group}: rows of {columns} are not a multiple of more"
            )
            return replace(spec, group_size=group), reason
    return None, f"not quantised: rows of {columns} are not a multiple of {min(MODES[spec.mode][1])}"


def make_recipe(
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    recipe: str | Path | Recipe | None = None,
) -> Recipe:
    """The recipe behind the options of a conversion.

    Args:
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128 (affine).
        mode: affine, mxfp4, mxfp8 or nvfp4.
        recipe: "mxfp4", "mxfp8", "nvfp4", "mixed-A-B" (B bits for embedding, head and output projections, A for the
            rest), a JSON file with bits, group_size, mode, gate_bits and overrides [{"match": pattern, "bits": ...}],
            or a `Recipe`, which is returned.

    Raises:
        InputError: options that contradict each other or that no kernel exists for.
    """
    if recipe is None:
        if bits is None and mode is None:
            if group_size is not None:
                raise InputError("A group size needs a number of bits.", "Add -q 4.")
            return Recipe()
        return _uniform({"bits": bits, "group_size": group_size, "mode": mode})
    if bits is not None or mode is not None:
        raise InputError("A recipe already says how many bits to use.", "Give either the bits or a recipe.")
    if isinstance(recipe, Recipe):
        if group_size is not None:
            raise InputError("The recipe already says the group size.", "Leave it out.")
        return recipe
    if str(recipe) in MODES and recipe != "affine":
        return _uniform({"mode": str(recipe), "group_size": group_size})
    if match := _MIXED.match(str(recipe)):
        low = _uniform({"bits": int(match[1]), "group_size": group_size})
        assert low.base is not None
        high = replace(low.base, bits=int(match[2]))
        return replace(low, overrides=tuple(Override(pattern, high) for pattern in _MIXED_MATCH))
    if Path(recipe).is_file():
        if group_size is not None:
            raise InputError("The recipe file already says the group size.", "Leave --group-size out.")
        return _from_file(Path(recipe))
    raise InputError(
        f"There is no recipe '{recipe}'.",
        "Use mxfp4, mxfp8, nvfp4, mixed-A-B such as mixed-4-6, or the path of a JSON file.",
    )


def _uniform(settings: Mapping[str, Any]) -> Recipe:
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        base = read_spec(given, "quantisation")
    except UnsupportedError as error:
        raise InputError(error.message, error.hint) from error
    group = base.group_size if base.mode == "affine" else 64
    return Recipe(base, QuantSpec(max(GATE_BITS, base.bits), group))


def _from_file(path: Path) -> Recipe:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not (data.get("bits") or data.get("mode")):
            raise InputError(f"{path.name} does not say how many bits to use.", 'At least: {"bits": 4}')
        if unknown := sorted(set(data) - _FIELDS):
            raise InputError(
                f"{path.name} has an unknown field '{unknown[0]}'.", f"Fields: {', '.join(sorted(_FIELDS))}."
            )
        recipe = _uniform({key: data.get(key) for key in ("bits", "group_size", "mode")})
        assert recipe.base is not None
        if data.get("gate_bits") is not None:
            gate = check_spec(replace(recipe.gate, bits=int(data["gate_bits"])), "gate_bits")
            recipe = replace(recipe, gate=gate)
        for item in data.get("overrides", []):
            kept = {key: value for key, value in item.items() if key != "match"}
            spec = None if item["bits"] is None else read_spec(kept, str(item["match"]), recipe.base)
            recipe = recipe.with_override(str(item["match"]), spec)
        return recipe
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnsupportedError) as error:
        if isinstance(error, InputError):
            raise
        reason = error.message if isinstance(error, UnsupportedError) else "a value is missing or of the wrong kind"
        if isinstance(error, json.JSONDecodeError):
            reason = str(error)
        raise InputError(f"The recipe {path.name} cannot be read: {reason}", "See `mlxlin convert --help`.") from error
