"""The decoder: a pure function from (tokens, state) to (logits, state)."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain, islice
from typing import Literal

from mlxlin.backend import mx
from mlxlin.errors import InputError
from mlxlin.models.blocks import Embedding, Head, Matrix
from mlxlin.models.fingerprint import fingerprint
from mlxlin.models.layer import Layer, layer_parameters
from mlxlin.models.mixers.step import Step
from mlxlin.models.norms import Norm
from mlxlin.models.params import Parameter, Params, QuantSpec, Table, under
from mlxlin.models.residual import Residual
from mlxlin.models.spec import ModelSpec
from mlxlin.state import LayerState, State

Logits = Literal["all", "last", "none"]
Lengths = Sequence[int] | mx.array
Tokens = Sequence[Sequence[int]] | mx.array


def parameters(spec: ModelSpec) -> Table:
    """Every parameter of a model: name -> shape and role, in the order of use."""
    table: Table = {"embed.weight": Parameter((spec.vocab, spec.width), "embedding")}
    if spec.embed_norm is not None:
        table.update(under("embed_norm", Norm.parameters(spec.embed_norm, spec.width)))
    for index, layer in enumerate(spec.layers):
        table.update(under(f"layers.{index}", layer_parameters(layer, spec.width)))
    table.update(under("norm", Norm.parameters(spec.norm, spec.width)))
    if not spec.tied:
        table["head.weight"] = Parameter((spec.vocab, spec.width), "head")
    return table


class Model:
    """A decoder built from its declaration and its parameters.

    Args:
        spec: what to build.
        params: internal name -> array, all of `parameters(spec)` and nothing else; where a matrix is packed, `scales`
            and `biases` lie beside its `weight`. Emptied, so that the arrays merged into others are freed.
        quantization: name of a matrix (without `.weight`) -> how it is packed.

    Raises:
        CheckpointError: a parameter is missing or left over.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: MutableMapping[str, mx.array],
        quantization: Mapping[str, QuantSpec] | None = None,
    ) -> None:
        self.spec = spec
        self.parameter_count = sum(math.prod(parameter.shape) for parameter in parameters(spec).values())
        self.nbytes = sum(array.nbytes for array in params.values())
        self.fingerprint = fingerprint(spec, params, quantization or {})
        taken = Params(params, quantization or {})
        self._norm = Norm(spec.norm, taken.at("norm"))
        assert self._norm.weight is not None
        self.dtype: mx.Dtype = self._norm.weight.dtype
        self._embed = Embedding(Matrix.take(taken, "embed"), self.dtype, spec.embed_factor)
        self._embed_norm = Norm(spec.embed_norm, taken.at("embed_norm")) if spec.embed_norm is not None else None
        self._head = Head(self._embed.matrix if spec.tied else Matrix.take(taken, "head"), spec.logit_factor)
        self._layers: list[Layer] = []
        for index, layer in enumerate(spec.layers):
            self._layers.append(Layer(layer, spec.width, taken.at(f"layers.{index}"), self.dtype))
            taken.settle()
        taken.finish()
        empty = self.fresh()
        self._parts = len(empty.layers)
        self._has_keys = any(True for _ in empty.keys_values())
        self._recurrent_nbytes = empty.recurrent_nbytes
        self.kv_bytes_per_token = sum(layer.row_nbytes for layer in empty.keys_values())

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.spec.vocab

    @property
    def context(self) -> int:
        """Tokens the model was trained for."""
        return self.spec.context

    def state_nbytes(self, context: int) -> int:
        """Bytes of a one-row state after `context` tokens."""
        return self._recurrent_nbytes + context * self.kv_bytes_per_token

    def fresh(self, batch: int = 1) -> State:
        """The state before the first token, for `batch` rows."""
        layers = chain.from_iterable(layer.fresh(batch) for layer in self._layers)
        return State(tuple(layers), mx.zeros((batch,), dtype=mx.int32))

    def __call__(
        self, tokens: Tokens, state: State | None = None, *, lengths: Lengths | None = None, logits: Logits = "all"
    ) -> tuple[mx.array | None, State]:
        """Read tokens and predict.

        Args:
            tokens: [B, T] int32, T >= 0; rows shorter than T are padded on the right with any valid token. An array
                with T = 1 is not checked for being within the vocabulary.
            state: what came before; None for nothing. Stays valid.
            lengths: real tokens of each row, [B]; padding enters no state. None when all T are real.
            logits: for "all" tokens, for the "last" real one of each row, or "none".

        Returns:
            Logits, float32 [B, T, vocab] or [B, 1, vocab] or None, and the state after the last real token of each row.
            With T = 0 the logits are [B, 0, vocab] and the state is the given one.

        Raises:
            InputError: shapes that do not fit each other or the model.
        """
        ids = self._token_array(tokens)
        batch, length = ids.shape
        before = self.fresh(batch) if state is None else state
        if before.batch != batch or len(before.layers) != self._parts:
            raise InputError(
                f"The state has {before.batch} rows and {len(before.layers)} parts, "
                f"the tokens {batch} rows and the model's state {self._parts} parts."
            )
        if logits not in ("all", "last", "none"):
            raise InputError(f"logits must be 'all', 'last' or 'none', not {logits!r}.")
        if length == 0:
            return None if logits == "none" else mx.zeros((batch, 0, self.vocab_size)), before
        step = self._step(before, _length_array(lengths, batch, length), length)
        x, after = self._run(ids, before, step)
        return self._predict(x, step, logits), after

    def _run(self, ids: mx.array, before: State, step: Step) -> tuple[Residual, State]:
        embedded = self._embed(ids)
        if self._embed_norm is not None:
            embedded = self._embed_norm(embedded)
        x = Residual(embedded)
        left, layers = iter(before.layers), list[LayerState]()
        for layer in self._layers:
            x, new = layer(x, tuple(islice(left, layer.parts)), step)
            layers.extend(new)
        advance = step.length if step.lengths is None else step.lengths
        return x, State(tuple(layers), before.positions + advance, step.slots)

    def _predict(self, x: Residual, step: Step, logits: Logits) -> mx.array | None:
        if logits == "none":
            return None
        if logits == "last" and step.lengths is None:
            x = x.each(lambda z: z[:, -1:])
        elif logits == "last":
            assert step.lengths is not None
            last = mx.maximum(step.lengths - 1, 0)[:, None, None]
            x = x.each(lambda z: mx.take_along_axis(z, last, axis=1))
        return self._head(x.normed(self._norm)[0])

    def _step(self, before: State, lengths: mx.array | None, length: int) -> Step:
        slots = None
        if self._has_keys and (before.slots is not None or lengths is not None):
            ahead = mx.arange(length)
            new = before.positions[:, None] + ahead
            if lengths is not None:
                new = mx.where(ahead < lengths[:, None], new, -1)
            old = before.slots
            if old is None:
                old = mx.broadcast_to(mx.arange(before.kv_length, dtype=mx.int32), (before.batch, before.kv_length))
            slots = mx.concatenate([old, new.astype(mx.int32)], axis=1)
        return Step(length, before.positions, lengths, slots)

    def _token_array(self, tokens: Tokens) -> mx.array:
        if isinstance(tokens, mx.array):
            ids = tokens
        else:
            if len({len(row) for row in tokens}) != 1:
                raise InputError("The rows of tokens differ in length; pad them on the right and pass lengths.")
            ids = mx.array([list(row) for row in tokens], dtype=mx.int32)
        if ids.ndim != 2:
            raise InputError(f"Tokens must be [B, T], got shape {tuple(ids.shape)}.")
        if not mx.issubdtype(ids.dtype, mx.integer):
            raise InputError(f"Tokens must be whole numbers, got {ids.dtype}.")
        # A row that is not there would be read from anywhere. One token per row is one that a sampler chose: looking at
        # it here would make decoding wait for it.
        if ids.size and (ids.shape[1] > 1 or not isinstance(tokens, mx.array)):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                bad = low if low < 0 else high
                raise InputError(f"Token {bad} is outside the vocabulary of {self.vocab_size}.")
        return ids


def _length_array(lengths: Lengths | None, batch: int, length: int) -> mx.array | None:
    """`lengths` on the device; None where it says nothing."""
    if lengths is None:
        return None
    if not isinstance(lengths, mx.array):
        if any(not 0 <= n <= length for n in lengths):
            raise InputError(f"lengths {list(lengths)} must lie between 0 and {length}.")
        if len(lengths) == batch and all(n == length for n in lengths):
            return None
        lengths = mx.array(list(lengths), dtype=mx.int32)
    if lengths.shape != (batch,):
        raise InputError(f"lengths has shape {tuple(lengths.shape)}, expected ({batch},).")
    return lengths.astype(mx.int32)
