"""Translation of a checkpoint's tensors into a model's parameters, with every tensor accounted for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models.decoder import parameters
from mlxlin.models.params import Parameter, Role
from mlxlin.models.rules import BEYOND, Rules, Weight
from mlxlin.models.spec import ModelSpec, MoeSpec
from mlxlin.models.ties import PACKED, Tensor, repeated, resolve_head
from mlxlin.models.values import Operation, Place

_OTHER = "The checkpoint is incomplete or damaged, or its config.json describes another model."


class Family(Protocol):
    """A module that knows one kind of checkpoint.

    SERVES: the (model_type, architecture) pairs it reads; None for any architecture.
    PREFIXES: leading parts of tensor names to leave away, the first that fits.
    DROPS: (pattern of a name without its prefix, or `rules.BEYOND`; what such tensors are).
    """

    SERVES: Sequence[tuple[str, str | None]]
    WEIGHTS: Sequence[Weight]
    PREFIXES: Sequence[str]
    DROPS: Sequence[tuple[str, str]]

    def spec(self, config: Mapping[str, Any]) -> ModelSpec: ...


@dataclass(frozen=True, eq=False)
class Target:
    """One array of the translated model.

    Attributes:
        name: internal name; packed matrices have targets `x.weight`, `x.scales` and perhaps `x.biases`.
        shape: of what `read` returns.
        role: see `Role`; `scales` and `biases` have the role of their matrix.
        sources: names in the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    sources: tuple[str, ...]
    _tensors: tuple[Tensor, ...]
    _operation: Operation
    _place: Place

    def read(self) -> mx.array:
        """The array, lazy, in the checkpoint's dtype."""
        array = self._operation.apply([tensor.read() for tensor in self._tensors], self._place)
        if tuple(array.shape) != self.shape:
            raise CheckpointError(f"{self.sources[0]} gives {tuple(array.shape)} for '{self.name}', not {self.shape}.")
        return array


@dataclass(frozen=True, eq=False)
class Plan:
    """A complete translation.

    Attributes:
        spec: the description that fits the tensors; differs from the given one only in `tied`.
        targets: everything the model needs, in the order of use.
        dropped: (name, reason) of every tensor that is not used.
        notices: what a person should be told.
    """

    spec: ModelSpec
    targets: list[Target] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def translate(family: Family, spec: ModelSpec, source: Mapping[str, Tensor]) -> Plan:
    """Plan how `source` becomes the parameters of `spec`; reads no tensor, except to compare a tied head.

    Raises:
        CheckpointError: a tensor is missing, unknown, ambiguous or of the wrong shape; all are named.
        UnsupportedError: a matrix is packed in a way that cannot be rearranged.
    """
    _refuse_impossible_mixtures(spec)
    names = _canonical_names(family, source)
    dropped = _drops(family, len(spec.layers), names)
    for canonical in dropped:
        del names[canonical]
    mlx_layout = _mlx_layout(names, source)
    spec, head = resolve_head(spec, names, source)
    plan = Plan(spec, notices=_drop_notices(dropped) + head.notices)
    plan.dropped.extend((name, reason) for name, reason in dropped.values())
    plan.dropped.extend(head.dropped)
    used: set[str] = set(head.used)
    rules = Rules(family.WEIGHTS, spec)
    missing: list[str] = []
    copies: dict[str, str] = {}
    for target, parameter in parameters(spec).items():
        rule, index = rules.find(target, names)
        if rule is None:
            missing.append(rules.wanted(target))
            continue
        place = Place(None if index is None else spec.layers[index], mlx_layout)
        for made in _targets(target, parameter, rule, place, names, source):
            plan.targets.append(made)
            used.update(made.sources)
        if rule.copy in names:
            copies[names[rule.copy]] = names[rule.names[0]]
    for copy, original in copies.items():
        if copy not in used:
            plan.dropped.append(repeated(copy, original, source))
            used.add(copy)
    _refuse_leftovers(list(dict.fromkeys(missing)), sorted(set(names.values()) - used))
    return plan


def _refuse_impossible_mixtures(spec: ModelSpec) -> None:
    """What no shape of a tensor tells."""
    for mix in {layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)}:
        divided = mix.experts % mix.groups == 0 and mix.groups_kept <= mix.groups
        within = mix.experts // mix.groups * mix.groups_kept
        if not divided or mix.active > within or (mix.groups > 1 and mix.experts < 2 * mix.groups):
            raise CheckpointError(
                f"config.json: {mix.active} experts cannot be chosen from {mix.groups_kept} of {mix.groups} groups of "
                f"{mix.experts} experts in all.",
                hint=_OTHER,
            )


def _canonical_names(family: Family, source: Mapping[str, Tensor]) -> dict[str, str]:
    """Name without prefix -> name in the checkpoint."""
    names: dict[str, str] = {}
    for name in source:
        prefix = next((p for p in family.PREFIXES if name.startswith(p)), "")
        canonical = name[len(prefix) :]
        if canonical in names:
            raise CheckpointError(f"The checkpoint holds both '{names[canonical]}' and '{name}'.")
        names[canonical] = name
    return names


def _drops(family: Family, layers: int, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    def fits(pattern: str, canonical: str) -> bool:
        if pattern != BEYOND:
            return re.match(pattern, canonical) is not None
        layer = re.match(r"layers\.(\d+)\.", canonical)
        return layer is not None and int(layer[1]) >= layers

    found: dict[str, tuple[str, str]] = {}
    for canonical, name in names.items():
        reason = next((reason for pattern, reason in family.DROPS if fits(pattern, canonical)), None)
        if reason is not None:
            found[canonical] = (name, reason)
    return found


def _drop_notices(dropped: Mapping[str, tuple[str, str]]) -> list[str]:
    counts: dict[str, int] = {}
    for _, reason in dropped.values():
        counts[reason] = counts.get(reason, 0) + 1
    return [f"dropped {count} {reason}" for reason, count in counts.items()]


def _mlx_layout(names: Mapping[str, str], source: Mapping[str, Tensor]) -> bool:
    """Whether convolutions are stored [C, W, 1], as MLX tools do."""
    found: dict[bool, str] = {}
    for canonical, name in names.items():
        shape = source[name].shape
        if canonical.endswith("conv1d.weight") and len(shape) == 3:
            found[shape[2] == 1 and shape[1] > 1] = name
    if len(found) == 2:
        raise CheckpointError(f"'{found[True]}' and '{found[False]}' are stored in different layouts.")
    return True in found


def _targets(
    target: str,
    parameter: Parameter,
    rule: Weight,
    place: Place,
    names: Mapping[str, str],
    source: Mapping[str, Tensor],
) -> list[Target]:
    """One target, or two or three of a packed matrix."""
    canonical = rule.names
    stems = [name.removesuffix("weight") for name in canonical]
    packed = [
        name.endswith(".weight") and f"{stem}scales" in names for name, stem in zip(canonical, stems, strict=True)
    ]
    if not any(packed):
        made = _target(target, parameter.role, canonical, rule.operation, place, names, source)
        if made.shape != parameter.shape:
            raise CheckpointError(
                f"'{made.sources[0]}' gives shape {made.shape}, expected {parameter.shape}.", hint=_OTHER
            )
        return [made]
    if not all(packed) or not rule.operation.rowwise:
        raise UnsupportedError(f"'{names[canonical[0]]}' is quantised in a way that cannot be rearranged.")
    parts = [part for part in PACKED if all(stem + part in names for stem in stems)]
    base = target.removesuffix("weight")
    made_parts = [
        _target(base + part, parameter.role, [s + part for s in stems], rule.operation, place, names, source)
        for part in parts
    ]
    if made_parts[0].shape[0] != parameter.shape[0]:
        raise CheckpointError(
            f"'{names[canonical[0]]}' gives {made_parts[0].shape[0]} rows, not {parameter.shape[0]}.", hint=_OTHER
        )
    return made_parts


def _target(
    name: str,
    role: Role,
    canonical: Sequence[str],
    operation: Operation,
    place: Place,
    names: Mapping[str, str],
    source: Mapping[str, Tensor],
) -> Target:
    actual = tuple(names[c] for c in canonical)
    tensors = tuple(source[n] for n in actual)
    try:  # arrays of zeros are lazy: this computes shapes and nothing else
        shape = tuple(operation.apply([mx.zeros(tensor.shape) for tensor in tensors], place).shape)
    except (ValueError, IndexError, TypeError) as error:  # TypeError: sizes that MLX has no integers for
        shapes = ", ".join(f"'{n}' {tuple(t.shape)}" for n, t in zip(actual, tensors, strict=True))
        raise CheckpointError(f"Tensors of unexpected shape: {shapes} ({error}).", hint=_OTHER) from error
    return Target(name, shape, role, actual, tensors, operation, place)


def _refuse_leftovers(missing: list[str], unknown: list[str]) -> None:
    for what, names in (("lacks", missing), ("holds unknown", unknown)):
        if names:
            shown = ", ".join(f"'{name}'" for name in names[:4])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise CheckpointError(
                f"The checkpoint {what} {'tensors' if len(names) > 1 else 'tensor'} {shown}{more}.",
                hint=_OTHER,
            )
