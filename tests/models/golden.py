"""Checkpoints with golden outputs: loading one, and everything a model must reproduce of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlin.backend import mx
from mlxlin.models import Model, Plan, find, translate

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
# Largest difference of a logit (they are of order one) and of a state entry, in float32.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Held:
    """A tensor of a checkpoint that is in memory already."""

    array: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> str:
        return {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32"}[self.array.dtype]

    def read(self) -> mx.array:
        return self.array


def plan_of(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Plan:
    """The translation of a checkpoint."""
    family = find(config)
    return translate(family, family.spec(config), {name: Held(array) for name, array in tensors.items()})


def model_of(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Model:
    """The model of a checkpoint."""
    plan = plan_of(config, tensors)
    return Model(plan.spec, {target.name: target.read() for target in plan.targets})


@dataclass(frozen=True)
class Golden:
    """A checkpoint and what its source computes for it."""

    config: dict[str, Any]
    tensors: dict[str, mx.array]
    expected: dict[str, mx.array]

    @classmethod
    def load(cls, folder: Path) -> Golden:
        """Read config.json, model.safetensors and golden.safetensors."""
        tensors, expected = (mx.load(str(folder / f"{name}.safetensors")) for name in ("model", "golden"))
        return cls(json.loads((folder / "config.json").read_text()), tensors, expected)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [int(n) for n in self.expected["lengths"]]

    def row(self, index: int) -> mx.array:
        """The real tokens of a row, [1, n]."""
        return self.expected["ids"][index : index + 1, : self.lengths[index]]

    def logits(self, index: int) -> mx.array:
        """What the source predicts for them, [1, n, vocab]."""
        return self.expected["logits"][index : index + 1, : self.lengths[index]]


def difference(a: mx.array, b: mx.array) -> float:
    """Largest absolute difference; infinite where one side is not finite or the shapes differ."""
    if a.shape != b.shape or not bool(mx.all(mx.isfinite(a))):
        return float("inf")
    return float(mx.abs(a - b).max()) if a.size else 0.0
