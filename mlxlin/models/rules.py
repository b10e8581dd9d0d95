"""Rules that say which tensors of a checkpoint become which parameter of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxlin.models.spec import ModelSpec, MoeSpec
from mlxlin.models.values import COPY, Operation

BEYOND = "layers behind the last"  # as a pattern in DROPS: layers whose index the model does not have


@dataclass(frozen=True)
class Weight:
    """One rule: a model's parameter and the checkpoint's tensors it is made of.

    `{i}` in names stands for the layer's index, `{e}` for the index of each expert in turn. Several rules for one
    target are alternatives: the first whose tensors all exist is taken. `copy` names a tensor that may repeat the
    source because the two are tied. `kind` restricts the rule to layers with that kind of mixer; of a layer without
    one, to its kind of feed-forward part.
    """

    target: str
    sources: str | tuple[str, ...]
    operation: Operation = COPY
    copy: str = ""
    kind: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The sources, always as a tuple."""
        return (self.sources,) if isinstance(self.sources, str) else self.sources


class Rules:
    """WEIGHTS, by target."""

    def __init__(self, weights: Sequence[Weight], spec: ModelSpec) -> None:
        self._layers = spec.layers
        self._by_target: dict[str, list[Weight]] = {}
        for weight in weights:
            self._by_target.setdefault(weight.target, []).append(weight)

    def find(self, target: str, names: Mapping[str, str]) -> tuple[Weight | None, int | None]:
        """The rule for `target`, its layer filled in, whose sources exist; and the layer's index."""
        pattern, index = _pattern(target)
        for weight in self._options(pattern, index):
            sources = tuple(filled for name in weight.names for filled in self._each_expert(_fill(name, index), index))
            if sources and all(name in names for name in sources):
                return Weight(target, sources, weight.operation, _fill(weight.copy, index)), index
        return None, index

    def _options(self, pattern: str, index: int | None) -> list[Weight]:
        kind = "" if index is None else self._layers[index].kind
        return [weight for weight in self._by_target.get(pattern, []) if weight.kind in ("", kind)]

    def _each_expert(self, name: str, index: int | None) -> list[str]:
        if "{e}" not in name or index is None:
            return [name]
        mlp = self._layers[index].mlp
        return [name.replace("{e}", str(expert)) for expert in range(mlp.experts if isinstance(mlp, MoeSpec) else 0)]

    def wanted(self, target: str) -> str:
        """What to call a missing target: the tensor of the checkpoint that it would come from."""
        pattern, index = _pattern(target)
        options = self._options(pattern, index)
        return _fill(options[0].names[0], index).replace("{e}", "0") if options else target


def _pattern(target: str) -> tuple[str, int | None]:
    match = re.match(r"layers\.(\d+)\.", target)
    return (f"layers.{{i}}.{target[match.end() :]}", int(match[1])) if match else (target, None)


def _fill(name: str, index: int | None) -> str:
    return name if index is None else name.replace("{i}", str(index))
