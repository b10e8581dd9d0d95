"""The sum that runs beside all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from mlxlin.backend import mx, on_metal
from mlxlin.metal.layers import add_norm
from mlxlin.models.norms import Norm
from mlxlin.recurrences.probe import TOLERANCE, float64, relative_error, trusted_by_key


@dataclass(frozen=True, eq=False)
class Residual:
    """A sum [B, T, D] whose last term may still be due: on Metal the norm behind it adds it in the same pass."""

    x: mx.array
    term: mx.array | None = None

    @cached_property
    def total(self) -> mx.array:
        """The whole sum."""
        return self.x if self.term is None else self.x + self.term

    def plus(self, term: mx.array) -> Residual:
        """The sum with one more term, which is now due."""
        return Residual(self.total, term)

    def each(self, change: Callable[[mx.array], mx.array]) -> Residual:
        """The sum of changed parts, where a change may as well come before it: choosing tokens, say."""
        return Residual(change(self.x), None if self.term is None else change(self.term))

    def normed(self, norm: Norm) -> tuple[mx.array, Residual]:
        """norm(total), and the sum with nothing due."""
        x, term = self.x, self.term
        if term is None or not on_metal() or not _takes(norm, x, term):
            return norm(self.total), Residual(self.total)
        assert norm.weight is not None
        centered = norm.spec.kind == "layer"
        total, normed = add_norm(x, term, norm.weight, norm.spec.eps, centered=centered, bias=norm.bias)
        return normed, Residual(total)


def _takes(norm: Norm, x: mx.array, term: mx.array) -> bool:
    """Whether a kernel adds and norms, and does it right here."""
    width, dtype, centered = x.shape[-1], x.dtype, norm.spec.kind == "layer"
    if norm.weight is None or term.dtype != dtype or dtype not in TOLERANCE or norm.groups > 1:
        return False
    key = f"add_norm-{norm.spec.kind}{'' if norm.bias is None else '-bias'}-{width}-{str(dtype).rsplit('.', 1)[-1]}"
    return trusted_by_key(key, lambda: _complaint(width, dtype, centered, norm.bias is not None))


def _complaint(width: int, dtype: mx.Dtype, centered: bool, biased: bool) -> str:
    """What is wrong with the kernel's results for random rows; empty where nothing is."""
    x, term, vectors = (mx.random.normal((1, 3, width), key=mx.random.key(i)).astype(dtype) for i in range(3))
    weight, bias = vectors[0, 0], vectors[0, 1] if biased else None
    total, normed = add_norm(x, term, weight, 1e-6, centered=centered, bias=bias)
    exact, weight = (x + term).astype(mx.float32), weight.astype(mx.float32)
    bias = None if bias is None else bias.astype(mx.float32)
    expected = mx.fast.layer_norm(exact, weight, bias, 1e-6) if centered else mx.fast.rms_norm(exact, weight, 1e-6)
    error = max(relative_error(total, float64(x + term)), relative_error(normed, float64(expected)))
    return "" if error < TOLERANCE[dtype] else f"results are off by {error:.1e}"
