"""A model run layer by layer, each read from disk when it is needed: for models larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mlxlin.backend import compute_dtype, mx, on_metal
from mlxlin.convert.prepare import Arrays, Item, Prepared
from mlxlin.convert.resolve import Progress
from mlxlin.loader import Plan, stored_dtype
from mlxlin.models import QuantSpec
from mlxlin.models.blocks import Embedding, Head, Matrix
from mlxlin.models.decoder import Layer
from mlxlin.models.mixers.step import Step
from mlxlin.models.norms import Norm
from mlxlin.models.params import Params
from mlxlin.models.residual import Residual
from mlxlin.models.spec import NormSpec

_HEAD_ROWS = 1 << 14  # vocabulary entries whose logits are computed at a time


class Layerwise:
    """A prepared model; holds one layer at most.

    Args:
        prepared: what to run.
        ids: tokens [T] it is run on.
    """

    def __init__(self, prepared: Prepared, ids: Sequence[int]) -> None:
        self.spec = prepared.spec
        self._ids = list(ids)
        dtype = compute_dtype(stored_dtype(prepared))
        self._plan = Plan(dtype, unpack=not on_metal(), nbytes=0)
        self._items: dict[str, list[Item]] = {}
        for item in prepared.items:
            self._items.setdefault(_part(item.name), []).append(item)
        self._step = Step(len(ids), mx.zeros((1,), mx.int32))

    def embed(self) -> mx.array:
        """The embedded tokens, [1, T, D]."""
        (item,) = self._items["embed"]
        rows, where = np.unique(np.array(self._ids), return_inverse=True)
        arrays = self._rows(item, item.read(), mx.array(rows))
        matrix = Matrix.take(self._params([item], arrays), "embed")
        x = Embedding(matrix, self._plan.dtype, self.spec.embed_factor)(mx.array(where.reshape(1, -1).astype(np.int32)))
        if self.spec.embed_norm is not None:
            x = self._norm("embed_norm", self.spec.embed_norm)(x)
        mx.eval(x)
        return x

    def layer(self, index: int, x: mx.array, items: list[Item] | None = None) -> mx.array:
        """Layer `index` on x [1, T, D]; `items` replaces its parameters."""
        step = self._step if items is None else replace(self._step)  # a layer tried out leaves nothing for others
        items = self.items(index) if items is None else items
        arrays: Arrays = {}
        for item in items:
            arrays.update(self._plan.read(item))
        layer = Layer(
            self.spec.layers[index],
            self.spec.width,
            self._params(items, arrays).at(f"layers.{index}"),
            self._plan.dtype,
        )
        after, _ = layer(Residual(x), layer.fresh(1), step)
        mx.eval(after.total)
        return after.total

    def items(self, index: int) -> list[Item]:
        """The parameters of a layer."""
        return self._items[f"layers.{index}"]

    def named(self, part: str) -> list[Item]:
        """The parameters of the "embed", "norm" or "head" part."""
        return self._items[part]

    def hidden(self, progress: Progress | None = None) -> mx.array:
        """What the last layer gives, [1, T, D]; `progress` is called with (layers done, layers in all)."""
        x = self.embed()
        for index in range(len(self.spec.layers)):
            x = self.layer(index, x)
            if progress is not None:
                progress(index + 1, len(self.spec.layers))
        return x

    def logits(self, x: mx.array) -> mx.array:
        """Logits [T, vocab] of the last layer's output, float32; the head is computed in blocks of rows."""
        blocks = list(self._head_blocks(self._norm("norm", self.spec.norm)(x)[0]))
        return mx.concatenate(blocks, axis=-1)

    def _norm(self, part: str, spec: NormSpec) -> Norm:
        arrays: Arrays = {}
        for item in self._items[part]:
            arrays.update(self._plan.read(item))
        return Norm(spec, self._params(self._items[part], arrays).at(part))

    def _head_blocks(self, x: mx.array) -> Iterator[mx.array]:
        (item,) = self._items["embed" if self.spec.tied else "head"]
        name = item.name.removesuffix(".weight")
        stored = item.read()
        for start in range(0, self.spec.vocab, _HEAD_ROWS):
            rows = mx.arange(start, min(start + _HEAD_ROWS, self.spec.vocab))
            matrix = Matrix.take(self._params([item], self._rows(item, stored, rows)), name)
            block = Head(matrix, self.spec.logit_factor)(x)
            mx.eval(block)
            yield block

    def _rows(self, item: Item, arrays: Arrays, rows: mx.array) -> Arrays:
        return self._plan.form(item, {name: array[rows] for name, array in arrays.items()})

    def _params(self, items: list[Item], arrays: Arrays) -> Params:
        packed: dict[str, QuantSpec] = {}
        if not self._plan.unpack:
            packed = {item.name: item.quantization for item in items if item.quantization is not None}
        return Params(arrays, packed)


def _part(name: str) -> str:
    """ "layers.3" of "layers.3.mixer.out", "embed" of "embed.weight"."""
    pieces = name.split(".")
    return ".".join(pieces[:2]) if pieces[0] == "layers" else pieces[0]
