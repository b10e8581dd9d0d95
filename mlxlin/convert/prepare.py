"""From an opened checkpoint to the list of what a model consists of; each item knows its stored form before it is read.

The same list is written by a conversion and filled into a model by `load`, which is why both give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, InputError, NumericsError, UnsupportedError
from mlxlin.models import Family, ModelSpec, Plan, QuantSpec, Role, Target, find, parameters, rwkv7, translate

from .formats import Source, Tensor
from .formats.tensor import DTYPES, dtype_name
from .quantize import packed_shapes, quantize
from .recipe import Recipe, describe_spec
from .writer import Shape

Arrays = dict[str, mx.array]
_PARTS = ("weight", "scales", "biases")
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Item:
    """One parameter of a model.

    Attributes:
        name: internal name; of a quantised matrix without `.weight`.
        role: see `models.params.Role`.
        shape: unquantised.
        sources: the checkpoint's tensors it is made of.
        stored: name -> dtype and shape of the arrays `read` gives.
        read: the arrays, by name.
        quantization: how the matrix is packed; None for plain numbers.
        pieces: of a plain matrix stacked from many (experts), one reader for each, to be read one at a time.
        note: why it is stored differently from what was asked for.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    stored: dict[str, Shape]
    read: Callable[[], Arrays]
    quantization: QuantSpec | None = None
    pieces: tuple[Callable[[], mx.array], ...] = ()
    note: str = ""

    def stream(self) -> Iterator[tuple[str, Iterator[mx.array]]]:
        """The arrays in the order of `stored`, each as consecutive blocks, so that no stack is ever whole in memory."""
        if self.pieces:
            yield self.name, (piece() for piece in self.pieces)
            return
        arrays = self.read()
        for name in self.stored:
            yield name, iter([arrays.pop(name)])

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return sum(shape.nbytes for shape in self.stored.values())

    @property
    def form(self) -> str:
        """How it is stored, in words: "4-bit affine, groups of 64" or "bfloat16"."""
        if self.quantization is not None:
            return describe_spec(self.quantization)
        return str(DTYPES[self.stored[self.name].dtype][1]).rpartition(".")[2]

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Prepared:
    """A whole model, described but not read.

    Attributes:
        spec: what to build.
        items: everything it needs, in the order of use.
        format: of the source.
        dropped: (name, reason) of the checkpoint's tensors that are not used.
        notices: what a person should be told.
    """

    spec: ModelSpec
    items: list[Item]
    format: str
    dropped: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def quantization(self) -> dict[str, QuantSpec]:
        """Name of a matrix -> how it is packed."""
        return {item.name: item.quantization for item in self.items if item.quantization is not None}

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def parameter_count(self) -> int:
        return sum(item.size for item in self.items)


def prepare(source: Source, recipe: Recipe, dtype: mx.Dtype | None = None) -> Prepared:
    """Translate a checkpoint and decide how each of its parameters is stored.

    Args:
        source: an opened checkpoint.
        recipe: what to quantise.
        dtype: of what stays float; None keeps the checkpoint's.

    Raises:
        UnsupportedError: a model or a config mlxlin does not run.
        CheckpointError: tensors missing, unknown or of the wrong shape.
        InputError: a recipe for a checkpoint that is already quantised.
    """
    if not source.config:  # a bare `.pth`: RWKV's are published so
        source = replace(source, config=rwkv7.config_of(source.tensors))
    family = find(source.config)
    source = _rearrangeable(source, family)
    plan = translate(family, family.spec(source.config), source.tensors)
    # a second translation over zeros, which costs nothing, tells the dtypes
    blank = translate(family, plan.spec, _blank(source.tensors))
    stored = {target.name: Shape(dtype_name(target.read().dtype), target.shape) for target in blank.targets}
    items = list(_items(source, plan, stored))
    dropped, notices = (*source.dropped, *plan.dropped), (*source.notices, *plan.notices)
    return requantize(Prepared(plan.spec, items, source.format, dropped, notices), recipe, dtype)


def _blank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.blank() for name, tensor in tensors.items()}


def _rearrangeable(source: Source, family: Family) -> Source:
    """`source` with those packed matrices unpacked that a parameter joins with differently stored ones."""
    if not source.quantization:
        return source
    loose = source.unpack(source.quantization)
    plan = translate(family, family.spec(source.config), _blank(loose.tensors))
    mixed: set[str] = set()
    for target in plan.targets:
        modules = {name.removesuffix(".weight") for name in target.sources}
        if len({source.quantization.get(module) for module in modules}) > 1:
            mixed |= modules & set(source.quantization)
    source = source.unpack(mixed) if mixed else source
    try:
        translate(family, plan.spec, _blank(source.tensors))
    except UnsupportedError:  # some packed matrix is rearranged within its rows
        return loose
    return source


def requantize(prepared: Prepared, recipe: Recipe, dtype: mx.Dtype | None = None) -> Prepared:
    """The same model with its parameters stored otherwise.

    Raises:
        InputError: a recipe for a model that is already quantised, other than what it already is.
    """
    if recipe.base is not None and prepared.quantization:
        chosen = {item.name: recipe.choose(item.name, item.shape, item.role)[0] for item in prepared.items}
        if {name: spec for name, spec in chosen.items() if spec is not None} != prepared.quantization:
            raise InputError(
                "The checkpoint is already quantised, and not in this way; quantising it again would only lose.",
                "Leave the bits out, or start from the original checkpoint.",
            )
    return replace(prepared, items=[_stored_as(item, recipe, dtype) for item in prepared.items])


def _items(source: Source, plan: Plan, stored: dict[str, Shape]) -> Iterable[Item]:
    """One item per parameter; weight, scales and biases of a packed matrix belong together."""
    targets = {target.name: target for target in plan.targets}
    for name, parameter in parameters(plan.spec).items():
        module = name.removesuffix(".weight")
        if module + ".scales" not in targets:
            made = [targets[name]]
            sources, own = _sources(source, made), {name: stored[name]}
            pieces = _pieces(source, targets[name])
            yield Item(name, parameter.role, parameter.shape, sources, own, _reader(made), pieces=pieces)
            continue
        parts = [targets[f"{module}.{part}"] for part in _PARTS if f"{module}.{part}" in targets]
        sources = _sources(source, parts)
        spec = _common_spec(source, parts[0], parameter.shape)
        yield Item(
            module,
            parameter.role,
            parameter.shape,
            sources,
            {p.name: stored[p.name] for p in parts},
            _reader(parts),
            spec,
        )


def _pieces(source: Source, target: Target) -> tuple[Callable[[], mx.array], ...]:
    """Readers of the tensors that `target` is the stack of: E tensors of shape s make one of shape [E, *s]."""
    tensors = [source.tensors[name] for name in target.sources]
    shapes = {tensor.shape for tensor in tensors}
    stacked = len(tensors) > 1 and len(shapes) == 1 and target.shape == (len(tensors), *shapes.pop())
    return tuple(tensor.read for tensor in tensors) if stacked else ()


def _sources(source: Source, targets: list[Target]) -> tuple[str, ...]:
    """Names of the stored tensors that `targets` are made of, each once."""
    names = (name for target in targets for name in target.sources)
    return tuple(dict.fromkeys(part for name in names for part in source.tensors[name].parts or (name,)))


def _reader(targets: list[Target]) -> Callable[[], Arrays]:
    return lambda: {target.name: target.read() for target in targets}


def _common_spec(source: Source, weight: Target, shape: tuple[int, ...]) -> QuantSpec:
    specs = {source.quantization[name.removesuffix(".weight")] for name in weight.sources}
    if len(specs) != 1:
        raise CheckpointError(f"{', '.join(weight.sources)} belong together, but are quantised differently.")
    spec = specs.pop()
    if weight.shape[-1] * 32 != shape[-1] * spec.bits:
        raise CheckpointError(f"{weight.sources[0]} has {weight.shape[-1] * 32 // spec.bits} columns, not {shape[-1]}.")
    return spec


def _stored_as(item: Item, recipe: Recipe, dtype: mx.Dtype | None) -> Item:
    """`item` cast to `dtype` and, where it is not packed yet, quantised as the recipe says."""
    item = _cast(item, dtype)
    if item.quantization is not None:
        return item
    module = item.name.removesuffix(".weight")
    spec, note = recipe.choose(module, item.shape, item.role)
    if spec is None:
        return replace(item, note=note)
    shape = item.stored[item.name]
    stored = {f"{module}.{part}": s for part, s in packed_shapes(item.shape, shape.dtype, spec).items()}

    def read() -> Arrays:
        blocks = (block for _, part in item.stream() for block in part)
        parts = quantize(blocks, item.shape, spec, module)
        return {f"{module}.{part}": array for part, array in parts.items()}

    return replace(item, name=module, stored=stored, read=read, quantization=spec, pieces=(), note=note)


def _cast(item: Item, dtype: mx.Dtype | None) -> Item:
    """Floats in `dtype`, but for float32 vectors (norms, A_log, dt_bias), whose precision costs nothing."""
    if dtype is None:
        return item
    name = dtype_name(dtype)

    def wanted(shape: Shape) -> Shape:
        kept = item.role == "keep" and shape.dtype == "F32"
        return Shape(name, shape.shape) if shape.dtype in _FLOATS and not kept else shape

    stored = {key: wanted(shape) for key, shape in item.stored.items()}
    if stored == item.stored:
        return item

    def read() -> Arrays:
        return {key: _convert(array, stored[key].dtype, key) for key, array in item.read().items()}

    def cast(piece: Callable[[], mx.array]) -> Callable[[], mx.array]:
        return lambda: _convert(piece(), name, item.name)

    return replace(item, stored=stored, read=read, pieces=tuple(map(cast, item.pieces)))


def _convert(array: mx.array, dtype: str, name: str) -> mx.array:
    target = DTYPES[dtype][1]
    if target is None or array.dtype == target:
        return array
    result = array.astype(target)
    if target == mx.float16 and not mx.isfinite(result).all().item():
        raise NumericsError(f"{name} holds values beyond the range of float16.", "Use bfloat16 instead.")
    return result
