"""Bits where they matter: a recipe raised, part by part, until a model is close enough to its source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxlin.backend import mx
from mlxlin.check import Difference, measure, sample_tokens
from mlxlin.convert.formats import open_checkpoint
from mlxlin.convert.manifest import is_converted
from mlxlin.convert.prepare import Item, Prepared, prepare, requantize
from mlxlin.convert.recipe import Recipe
from mlxlin.convert.resolve import Notice, Progress, resolve
from mlxlin.errors import InputError
from mlxlin.layerwise import Layerwise
from mlxlin.models import QuantSpec

_LADDER = (2, 3, 4, 5, 6, 8)
_PER_BIT = 4.0  # one bit more halves the rounding error, and quarters its square
_AIM = 0.8  # of the target: what more bits bring is predicted, then measured


@dataclass
class _Part:
    """Matrices raised together: a layer's mixer or feed-forward part, the embedding, the head.

    specs: of those that are quantised. sizes: weights of all. float_bits: per weight of those that are not quantised.
    error: squared error of what the part gives, relative to its square, when only this part is quantised.
    """

    specs: dict[str, QuantSpec]
    sizes: dict[str, int]
    float_bits: int
    error: float

    def raised(self) -> _Part:
        """One step up the ladder; what was at its top stays float."""
        specs = {name: higher for name, spec in self.specs.items() if (higher := _higher(spec)) is not None}
        lowest = min(spec.bits for spec in self.specs.values())
        gained = min((spec.bits for spec in specs.values()), default=0) - lowest
        return replace(self, specs=specs, error=self.error / _PER_BIT**gained if specs else 0.0)

    def cost(self) -> float:
        """Bits taken."""
        return sum(
            (self.specs[name].bits if name in self.specs else self.float_bits) * size
            for name, size in self.sizes.items()
        )


def recipe_for(
    source: str | Path,
    recipe: Recipe,
    target_kl: float,
    *,
    revision: str | None = None,
    tokens: Sequence[int] | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> tuple[Recipe, Difference | None]:
    """Raise `recipe` where it matters most until KL(source || result) is at most `target_kl` nats.

    One pass measures, for every part of the model alone, the error that its quantisation makes. Then bits are added
    where they remove most error per bit, until the prediction meets the target, and the whole is measured again.

    Args:
        source: as for `load`; not quantised yet.
        recipe: the one to start from.
        target_kl: mean over the built-in text, in nats per token.
        revision: of a hub id.
        tokens: to measure on; None for the built-in text.
        progress: called with (layers done, layers in all) in each pass.
        notice: as for `load`.

    Returns:
        The recipe to convert with, and what was measured for it. Of a folder that is converted already the request
        itself, unmeasured: converting says whether it was made with the same one.

    Raises:
        InputError: nothing to raise, or a source that is quantised already.
    """
    if not target_kl > 0:
        raise InputError(f"The divergence to stay within is {target_kl}; it must be above 0.", "Say for example: 0.05")
    if recipe.base is None:
        raise InputError("A target for the divergence needs a number of bits to start from.", "Add -q 4.")
    path = resolve(source, revision, notice=notice)
    request = replace(recipe, target_kl=target_kl)
    if path.is_dir() and is_converted(path):
        return request, None
    exact = prepare(open_checkpoint(path), Recipe())
    if exact.quantization:
        raise InputError("The checkpoint is already quantised.", "Start from the original checkpoint.")
    ids = sample_tokens(path) if tokens is None else tokens
    quantised = requantize(exact, recipe)
    parts, logits = _measure_parts(exact, quantised, ids, progress)
    while True:
        model = Layerwise(requantize(exact, recipe), ids)
        found = measure(logits, model.logits(model.hidden(progress)), ids)
        if found.kl <= target_kl or not any(part.specs for part in parts):
            return replace(recipe, request=request), found
        parts = _raise(parts, _AIM * target_kl / found.kl)
        for name, start in quantised.quantization.items():
            spec = next(part.specs.get(name) for part in parts if name in part.sizes)
            recipe = recipe if spec == start else recipe.with_override(name, spec)


def _higher(spec: QuantSpec) -> QuantSpec | None:
    if spec.mode != "affine":
        return QuantSpec(5 if spec.bits == 4 else 8, 32)
    above = [bits for bits in _LADDER if bits > spec.bits]
    return QuantSpec(above[0], spec.group_size) if above else None


def _raise(parts: list[_Part], share: float) -> list[_Part]:
    """Parts with more bits, so that the sum of their errors falls to `share` of what it was; at least one is raised."""
    parts = list(parts)
    goal = share * sum(part.error for part in parts)
    while True:
        candidates = [(index, part, part.raised()) for index, part in enumerate(parts) if part.specs]
        if not candidates:
            return parts
        index, _, better = max(candidates, key=lambda c: (c[1].error - c[2].error) / (c[2].cost() - c[1].cost()))
        parts[index] = better
        if sum(part.error for part in parts) <= goal:
            return parts


def _measure_parts(
    exact: Prepared, quantised: Prepared, ids: Sequence[int], progress: Progress | None
) -> tuple[list[_Part], mx.array]:
    """Every part with the error of quantising it alone, and the exact logits."""
    a, b = Layerwise(exact, ids), Layerwise(quantised, ids)
    x = a.embed()
    parts = [_part(b.named("embed"), a.named("embed"), _relative(b.embed(), x))]
    for index in range(len(exact.spec.layers)):
        y = a.layer(index, x)
        for own, originals, mixture in _mixtures(b.items(index), a.items(index)):
            parts.append(_part(own, originals, _relative(a.layer(index, x, mixture), y)))
        x = y
        if progress is not None:
            progress(index + 1, len(exact.spec.layers))
    logits = a.logits(x)
    if not exact.spec.tied:
        parts.append(_part(b.named("head"), a.named("head"), _relative(b.logits(x), logits)))
    return [part for part in parts if part.specs], logits


def _mixtures(quantised: list[Item], exact: list[Item]) -> Iterator[tuple[list[Item], list[Item], list[Item]]]:
    """A layer's mixer, then the rest: quantised, as it was, and the whole layer with only this part quantised."""
    for mixer in (True, False):
        pairs = [(q, e, (".mixer." in e.name) == mixer) for q, e in zip(quantised, exact, strict=True)]
        yield (
            [q for q, _, own in pairs if own],
            [e for _, e, own in pairs if own],
            [q if own else e for q, e, own in pairs],
        )


def _part(quantised: list[Item], exact: list[Item], error: float) -> _Part:
    specs, sizes, bits = {}, {}, 16
    for item, original in zip(quantised, exact, strict=True):
        if item.quantization is not None:
            specs[item.name], sizes[item.name] = item.quantization, item.size
            bits = 8 * original.nbytes // original.size
    return _Part(specs, sizes, bits, error)


def _relative(got: mx.array, expected: mx.array) -> float:
    difference = (got.astype(mx.float32) - expected).square().sum()
    return float(mx.divide(difference, expected.astype(mx.float32).square().sum()).item())  # type: ignore[arg-type]
