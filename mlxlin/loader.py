"""A folder, hub id, alias or "demo" becomes a model and a tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from mlxlin.backend import compute_dtype, mx, on_metal
from mlxlin.convert.formats import open_checkpoint
from mlxlin.convert.formats.mlx_quantized import dequantize
from mlxlin.convert.formats.tensor import DTYPES
from mlxlin.convert.manifest import is_converted, open_converted
from mlxlin.convert.prepare import Arrays, Item, Prepared, prepare, requantize
from mlxlin.convert.recipe import Recipe, make_recipe
from mlxlin.convert.resolve import Notice, Progress, resolve
from mlxlin.errors import ResourceError
from mlxlin.memory import available_bytes
from mlxlin.models import Model
from mlxlin.tokenizer import Tokenizer

_FLOAT32 = ("A_log", "dt_bias")  # small, and the state remembers their rounding: never narrowed
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_FLOAT_NAMES = ("F32", "F16", "BF16")


def load(
    source: str | Path,
    *,
    dtype: mx.Dtype | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    recipe: str | Path | Recipe | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> tuple[Model, Tokenizer]:
    """Load a model and its tokenizer.

    Args:
        source: "demo", a folder (raw or converted), a weight file, a hub id, or an alias.
        dtype: to compute in; None for the checkpoint's on a GPU and float32 on the CPU.
        bits, group_size, recipe: quantise while loading, as `convert_checkpoint` would.
        revision: of a hub id: branch, tag or commit.
        progress: called with (bytes done, bytes in all), for the download and then for the weights.
        notice: called with a sentence the person should know: dropped tensors, ignored code, a slower path.

    Raises:
        CheckpointError, UnsupportedError: a checkpoint that is broken, or that mlxlin does not run.
        HubError: the hub has no such model, or cannot be reached.
        InputError: options that do not fit the source.
        ResourceError: the model does not fit into memory.
    """
    path = resolve(source, revision, progress=progress, notice=notice)
    prepared = open_path(path, bits, group_size, recipe)
    tokenizer = Tokenizer.from_folder(path if path.is_dir() else path.parent)  # before the weights, which take longer
    return _read(prepared, dtype, progress, notice), tokenizer


def load_model(
    source: str | Path,
    *,
    dtype: mx.Dtype | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    recipe: str | Path | Recipe | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Model:
    """`load` without the tokenizer."""
    path = resolve(source, revision, progress=progress, notice=notice)
    return _read(open_path(path, bits, group_size, recipe), dtype, progress, notice)


def _read(prepared: Prepared, dtype: mx.Dtype | None, progress: Progress | None, notice: Notice | None) -> Model:
    tell = notice or (lambda text: None)
    for text in prepared.notices:
        tell(text)
    plan = _fitting_plan(prepared, dtype)
    if plan.notice:
        tell(plan.notice)
    params: Arrays = {}
    done = 0
    for item in prepared.items:
        arrays = plan.read(item)
        params.update(arrays)
        done += sum(array.nbytes for array in arrays.values())
        if progress is not None:
            progress(done, plan.nbytes)
    return Model(prepared.spec, params, {} if plan.unpack else prepared.quantization)


def open_path(
    path: Path, bits: int | None = None, group_size: int | None = None, recipe: str | Path | Recipe | None = None
) -> Prepared:
    """The model at a path, described but not read, quantised as `convert_checkpoint` would where that is asked for."""
    chosen = make_recipe(bits, group_size, None, recipe)
    if path.is_dir() and is_converted(path):
        return requantize(open_converted(path), chosen)
    return prepare(open_checkpoint(path), chosen)


@dataclass(frozen=True)
class Plan:
    """How parameters become arrays to compute with: in which dtype, packed or not, and how large they get."""

    dtype: mx.Dtype
    unpack: bool
    nbytes: int
    notice: str = ""

    def read(self, item: Item) -> Arrays:
        """The arrays of one parameter, in memory."""
        arrays = self.form(item, item.read())
        mx.eval(arrays)
        return arrays

    def form(self, item: Item, arrays: Arrays) -> Arrays:
        """Stored arrays of a parameter, or some of its rows, as they are computed with; not evaluated."""
        if item.quantization is not None and self.unpack:
            parts = {key.rpartition(".")[2]: array for key, array in arrays.items()}
            return {f"{item.name}.weight": dequantize(parts, item.quantization, self.dtype)}
        return {key: self._cast(key, array) for key, array in arrays.items()}

    def _cast(self, name: str, array: mx.array) -> mx.array:
        narrow = self.dtype != mx.float32
        keep = array.dtype not in _FLOATS or (narrow and name.rpartition(".")[2] in _FLOAT32)
        return array if keep else array.astype(self.dtype)


def memory_plans(prepared: Prepared, dtype: mx.Dtype | None = None) -> list[Plan]:
    """The ways to hold a model in memory, the fastest first."""
    stored = stored_dtype(prepared)
    wanted = dtype or compute_dtype(stored)
    packed = Plan(wanted, False, _nbytes(prepared, wanted, False))
    if on_metal():
        return [packed]
    slow = "it runs slower on this CPU, because the faster form does not fit into memory"
    if prepared.quantization:
        unpacked = Plan(wanted, True, _nbytes(prepared, wanted, True))
        return [unpacked, replace(packed, notice=f"The model stays quantised; {slow}.")]
    if dtype is None and stored != wanted:
        notice = f"The model stays in {stored}; {slow}."
        return [packed, Plan(stored, False, _nbytes(prepared, stored, False), notice)]
    return [packed]


def _fitting_plan(prepared: Prepared, dtype: mx.Dtype | None) -> Plan:
    """The first plan that fits.

    Raises:
        ResourceError: none does.
    """
    plans, room = memory_plans(prepared, dtype), available_bytes()
    for plan in plans:
        if plan.nbytes <= room:
            return plan
    raise ResourceError(
        f"The model needs {plans[-1].nbytes / 1e9:.1f} GB of memory, but {room / 1e9:.1f} GB are free.",
        "Take a smaller model." if prepared.quantization else "Quantise it while loading with -q 4.",
    )


def stored_dtype(prepared: Prepared) -> mx.Dtype:
    """What the checkpoint computes in: the dtype of its embedding, or of the embedding's scales."""
    names = [shape.dtype for shape in prepared.items[0].stored.values() if shape.dtype in _FLOAT_NAMES]
    dtype = DTYPES[names[0] if names else "BF16"][1]
    assert dtype is not None
    return dtype


def _nbytes(prepared: Prepared, dtype: mx.Dtype, unpack: bool) -> int:
    """Bytes of all parameters with their floats in `dtype`."""
    total = 0
    for item in prepared.items:
        if item.quantization is not None and unpack:
            total += item.size * dtype.size
            continue
        for shape in item.stored.values():
            total += math.prod(shape.shape) * dtype.size if shape.dtype in _FLOAT_NAMES else shape.nbytes
    return total
