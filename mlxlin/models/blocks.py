"""The small parts that all layers are made of: projections, feed-forward, embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlxlin.backend import mx
from mlxlin.models.activations import relu2, swiglu
from mlxlin.models.params import Parameter, Params, QuantSpec, Table
from mlxlin.models.spec import MlpSpec


@dataclass(frozen=True, eq=False)
class Matrix:
    """A projection matrix [out, in], plain or packed, with its bias."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    quant: QuantSpec | None = None
    bias: mx.array | None = None

    @classmethod
    def take(cls, params: Params, name: str) -> Matrix:
        """The matrix stored under `name`, with scales, biases and bias as far as they are there."""
        part = params.at(name)
        quant = params.quantization(name)
        scales = part.take("scales") if quant is not None else None
        biases = part.take("biases") if quant is not None and part.has("biases") else None
        return cls(part.take("weight"), scales, biases, quant, part.take("bias") if part.has("bias") else None)

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """The plain numbers [out, in]."""
        if self.quant is None:
            return self.weight
        assert self.scales is not None
        bits, group_size, mode = self.quant.bits, self.quant.group_size, self.quant.mode
        plain = mx.dequantize(self.weight, self.scales, self.biases, group_size=group_size, bits=bits, mode=mode)
        return plain.astype(dtype)

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return int(self.weight.shape[0])


class Linear:
    """y = x W^T + bias, x [..., in] -> y [..., out]."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self._transposed = matrix.weight.T if matrix.quant is None else None

    def __call__(self, x: mx.array) -> mx.array:
        matrix = self.matrix
        if self._transposed is not None:
            return x @ self._transposed if matrix.bias is None else mx.addmm(matrix.bias, x, self._transposed)
        assert matrix.quant is not None and matrix.scales is not None
        y = mx.quantized_matmul(
            x,
            matrix.weight,
            matrix.scales,
            matrix.biases,
            transpose=True,
            group_size=matrix.quant.group_size,
            bits=matrix.quant.bits,
            mode=matrix.quant.mode,
        )
        return y if matrix.bias is None else y + matrix.bias


class Head(Linear):
    """The last projection: float32 logits, times a factor."""

    def __init__(self, matrix: Matrix, factor: float) -> None:
        super().__init__(matrix)
        self._factor = factor

    def __call__(self, x: mx.array) -> mx.array:
        logits = super().__call__(x).astype(mx.float32)
        return logits if self._factor == 1.0 else logits * self._factor


class Projections:
    """Several projections of one input, done as few products: neighbours stored alike become one matrix.

    Args:
        dtype: what to compute in; None for the dtype of the input.
    """

    def __init__(self, params: Params, names: Sequence[str], dtype: mx.Dtype | None = None) -> None:
        self._dtype = dtype
        groups: list[list[Matrix]] = []
        for matrix in (Matrix.take(params, name) for name in names):
            if dtype is not None and matrix.quant is None:
                matrix = replace(matrix, weight=params.made(matrix.weight.astype(dtype)))
            if groups and joinable(groups[-1][-1], matrix):
                groups[-1].append(matrix)
            else:
                groups.append([matrix])
        self._groups = [(Linear(joined(group, params)), _borders(group)) for group in groups]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """x [..., in] -> one array [..., out_n] for each name."""
        x = x if self._dtype is None else x.astype(self._dtype)
        outputs: list[mx.array] = []
        for linear, borders in self._groups:
            y = linear(x)
            outputs.extend(mx.split(y, borders, axis=-1) if borders else [y])
        return outputs


def joinable(a: Matrix, b: Matrix) -> bool:
    """Whether one product can serve both: stored alike."""
    return a.quant == b.quant and a.weight.dtype == b.weight.dtype and (a.bias is None) == (b.bias is None)


def joined(group: list[Matrix], params: Params) -> Matrix:
    """Matrices [..., out, in] of one input as one, their outputs side by side."""

    def together(field: str) -> mx.array | None:
        parts = [getattr(matrix, field) for matrix in group]
        return None if parts[0] is None else params.made(mx.concatenate(parts, axis=max(parts[0].ndim - 2, 0)))

    if len(group) == 1:
        return group[0]
    weight = together("weight")
    assert weight is not None
    return Matrix(weight, together("scales"), together("biases"), group[0].quant, together("bias"))


def _borders(group: list[Matrix]) -> list[int]:
    ends = [0]
    for matrix in group[:-1]:
        ends.append(ends[-1] + matrix.rows)
    return ends[1:]


def mlp_inputs(form: str) -> list[str]:
    """Names of the projections of a feed-forward part's input."""
    return ["gate", "up"] if form == "swiglu" else ["up"]


def hidden_function(form: str) -> Callable[..., mx.array]:
    """From the projected inputs of a feed-forward part to what its last projection reads."""
    return swiglu if form == "swiglu" else relu2


class Mlp:
    """Feed-forward: down(silu(gate x) * up x) or down(relu(up x)^2)."""

    def __init__(self, spec: MlpSpec, params: Params) -> None:
        self._inputs = Projections(params, mlp_inputs(spec.form))
        self._hidden = hidden_function(spec.form)
        self._down = Linear(Matrix.take(params, "down"))

    @staticmethod
    def parameters(spec: MlpSpec, width: int) -> Table:
        """Expected parameters."""
        sizes = {**dict.fromkeys(mlp_inputs(spec.form), (spec.hidden, width)), "down": (width, spec.hidden)}
        table: Table = {f"{name}.weight": Parameter(size, "matrix") for name, size in sizes.items()}
        if spec.bias:
            table.update({f"{name}.bias": Parameter(size[:1], "keep") for name, size in sizes.items()})
        return table

    def __call__(self, x: mx.array) -> mx.array:
        return self._down(self._hidden(*self._inputs(x)))


class Embedding:
    """Token ids to vectors, times a factor, and the head where it is tied."""

    def __init__(self, matrix: Matrix, dtype: mx.Dtype, factor: float) -> None:
        self.matrix = matrix
        self._dtype = dtype
        self._factor = factor

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens [B, T] -> [B, T, D]."""
        matrix = self.matrix
        picked = [None if part is None else part[tokens] for part in (matrix.weight, matrix.scales, matrix.biases)]
        assert picked[0] is not None
        x = Matrix(picked[0], picked[1], picked[2], matrix.quant).dense(self._dtype)
        return x if self._factor == 1.0 else x * self._factor
