"""Tensors that a checkpoint stores twice because they are tied: the head and the embedding, feature maps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError
from mlxlin.models.spec import ModelSpec

PACKED = ("weight", "scales", "biases")


class Tensor(Protocol):
    """A tensor of a checkpoint, not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self) -> mx.array: ...


@dataclass(frozen=True)
class Head:
    used: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    notices: list[str] = field(default_factory=list)


def resolve_head(spec: ModelSpec, names: Mapping[str, str], source: Mapping[str, Tensor]) -> tuple[ModelSpec, Head]:
    """A head saved beside a tied embedding: the same numbers are dropped, other numbers are used."""
    head = {part: names[f"lm_head.{part}"] for part in PACKED if f"lm_head.{part}" in names}
    if not spec.tied or "weight" not in head:
        return spec, Head()
    embeddings = [c for c in names if re.fullmatch(r"(embed_tokens|embeddings?|word_embeddings)\.weight", c)]
    stem = embeddings[0].removesuffix("weight") if embeddings else ""
    twins = {part: names.get(stem + part, "") for part in head}
    if all(twin and _equal(source[head[part]], source[twin]) for part, twin in twins.items()):
        reason = "copy of the embedding, to which the head is tied"
        return spec, Head(tuple(head.values()), tuple((name, reason) for name in head.values()))
    notice = "the config ties the head to the embedding, but lm_head.weight differs from it and is used"
    return dataclasses.replace(spec, tied=False), Head(notices=[notice])


def repeated(copy: str, original: str, source: Mapping[str, Tensor]) -> tuple[str, str]:
    if not _equal(source[copy], source[original]):
        raise CheckpointError(f"'{copy}' differs from '{original}', to which config.json ties it.")
    return copy, f"copy of {original}"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a.read(), b.read()))
