"""A checkpoint, once and for all: translated, perhaps quantised, and written as an mlxlin folder."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError, InputError
from mlxlin.tokenizer import Tokenizer, holds_tokenizer

from . import card
from .folder import MANIFEST, check_disk, check_target, new_folder
from .formats import open_checkpoint, safetensors
from .formats.tensor import dtype_name
from .manifest import Manifest, is_converted, open_converted, read_manifest
from .outline import open_outline
from .prepare import Prepared, prepare
from .recipe import Recipe, make_recipe
from .repository import SIDE_FILES
from .resolve import Notice, Progress, present, provenance, resolve
from .writer import index_text, shard, shard_names, write_shard

_SLACK = 1 << 22  # headers, card, manifest


@dataclass(frozen=True)
class Report:
    """What a conversion did, or would do.

    Attributes:
        out: the folder; None after a dry run.
        prepared: every parameter: its sources, its stored form and why, what was dropped, notices.
        recipe: what was asked for.
        carried: the source was a converted folder, copied as it is.
    """

    out: Path | None
    prepared: Prepared
    recipe: Recipe
    carried: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as stored."""
        return self.prepared.nbytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.prepared.parameter_count

    def kinds(self) -> list[tuple[str, int, int]]:
        """(how stored, number of parameters arrays, bytes), the largest first: "4-bit affine, groups of 64", "BF16"."""
        totals: dict[str, tuple[int, int]] = {}
        for item in self.prepared.items:
            count, nbytes = totals.get(item.form, (0, 0))
            totals[item.form] = (count + 1, nbytes + item.nbytes)
        rows = [(form, count, nbytes) for form, (count, nbytes) in totals.items()]
        return sorted(rows, key=lambda row: -row[2])

    def fates(self) -> list[tuple[str, str, int]]:
        """(tensor of the source, what becomes of it, bytes of that) for every one.

        Where several become one parameter, its bytes stand beside the first.
        """
        used = [
            (source, f"{item.name}, {item.form}{f' ({item.note})' if item.note else ''}", 0 if n else item.nbytes)
            for item in self.prepared.items
            for n, source in enumerate(item.sources)
        ]
        return used + [(name, f"dropped: {reason}", 0) for name, reason in self.prepared.dropped]


def convert_checkpoint(
    source: str | Path,
    out: str | Path | None = None,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    recipe: str | Path | Recipe | None = None,
    dtype: mx.Dtype | None = None,
    revision: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Report:
    """Convert a checkpoint to an mlxlin folder.

    The folder appears whole or not at all, and the same source and options give the same bytes. Memory holds what one
    parameter is made of at a time. A converted folder is copied as it is.

    Args:
        source: hub id, alias, folder, weight file or "demo".
        out: the folder to write; may be left out for a dry run.
        bits: 2, 3, 4, 5, 6 or 8; None keeps the numbers as they are.
        group_size: weights that share a scale: 32, 64 or 128.
        mode: affine, mxfp4, mxfp8 or nvfp4.
        recipe: a named recipe, a JSON file, or a `Recipe`, in place of bits and mode.
        dtype: of what stays float; None keeps the checkpoint's (bfloat16 for FP8 and compressed-tensors).
        revision: of a hub id.
        dry_run: only say what would be done; the weights of a hub id are not downloaded.
        progress: called with (bytes done, bytes in all), for the download and then for the output.
        notice: called with sentences a person should know.

    Raises:
        CheckpointError, TokenizerError, UnsupportedError: the source is broken or not something mlxlin runs.
        InputError: contradicting options, or an output that is not ours to replace.
        HubError, ResourceError: no access to the model; not enough disk.
    """
    chosen = make_recipe(bits, group_size, mode, recipe)
    target = None if out is None else Path(out)
    if target is None and not dry_run:
        raise InputError("An output folder is needed.", "Name one, or ask for a dry run.")
    if target is not None:
        check_target(target)
    tell = notice or (lambda text: None)
    if dry_run and present(source, revision) is None:
        prepared = open_outline(str(source), revision, chosen, dtype)
        for text in prepared.notices:
            tell(text)
        return Report(None, prepared, chosen)
    path = resolve(source, revision, progress=progress, notice=notice)
    if path.is_dir() and is_converted(path):
        return _carry(path, target, chosen, dtype, dry_run, progress)
    prepared = prepare(open_checkpoint(path, dtype or mx.bfloat16), chosen, dtype)
    for text in [*prepared.notices, *_about_tokenizer(path if path.is_dir() else path.parent)]:
        tell(text)
    if dry_run or target is None:
        return Report(None, prepared, chosen)
    _write(path, target, prepared, chosen, dtype, progress)
    return Report(target, prepared, chosen)


def _about_tokenizer(folder: Path) -> list[str]:
    """What to know of the source's tokenizer before its weights are converted, which may take long.

    Raises:
        TokenizerError: there is one that cannot be read.
    """
    if not holds_tokenizer(folder):
        return [f"{folder} holds no tokenizer; what is made of it cannot generate text without one."]
    Tokenizer.from_folder(folder)
    return []


def _write(
    path: Path, out: Path, prepared: Prepared, recipe: Recipe, dtype: mx.Dtype | None, progress: Progress | None
) -> None:
    folder = path if path.is_dir() else path.parent
    side = sorted({path for pattern in SIDE_FILES for path in folder.glob(pattern) if path.is_file()})
    check_disk(out, prepared.nbytes + sum(p.stat().st_size for p in side) + _SLACK)
    repo, commit = provenance(path)
    shapes = {name: shape for item in prepared.items for name, shape in item.stored.items()}
    shards = shard(shapes, [item.stored for item in prepared.items])
    files: dict[str, str] = {}
    with new_folder(out) as new, _no_cache():
        arrays = _arrays(prepared, progress)
        names = shard_names(len(shards))
        for name, keys in zip(names, shards, strict=True):
            files[name] = write_shard(new / name, shapes, keys, arrays)
        texts = {"README.md": card.text(prepared, recipe, repo, commit)}
        if len(shards) > 1:
            texts[safetensors.INDEX] = index_text(shapes, names, shards)
        for original in side:
            files[_copy(original, folder, new)] = ""
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        small = {name: _sha256(new / name) for name in [*texts, *(n for n, digest in files.items() if not digest)]}
        manifest = Manifest(
            prepared.spec,
            {"repo": repo, "revision": commit, "format": prepared.format},
            {"recipe": recipe.to_json(), "dtype": None if dtype is None else dtype_name(dtype)},
            prepared.quantization,
            files | small,
        )
        (new / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _arrays(prepared: Prepared, progress: Progress | None) -> Iterator[tuple[str, Iterator[mx.array]]]:
    """Every stored array in order, in blocks; nothing is kept."""
    done = 0
    for item in prepared.items:
        yield from item.stream()
        done += item.nbytes
        if progress is not None:
            progress(done, prepared.nbytes)


def _carry(
    path: Path, out: Path | None, recipe: Recipe, dtype: mx.Dtype | None, dry_run: bool, progress: Progress | None
) -> Report:
    """Copy a converted folder byte by byte, checking its hashes; its provenance stays the original's."""
    manifest, prepared, called = read_manifest(path), open_converted(path), provenance(path)[0] or path.name
    _refuse_changes(path, manifest, recipe, dtype)
    if dry_run or out is None:
        return Report(None, prepared, recipe, carried=True)
    if out.exists() and out.samefile(path):
        raise InputError(f"{out} is the source itself.", "Name another output folder.")
    sizes = {name: (path / name).stat().st_size for name in manifest.files if (path / name).is_file()}
    check_disk(out, sum(sizes.values()) + _SLACK)
    done = 0
    with new_folder(out) as new:
        for name, digest in manifest.files.items():
            if name not in sizes:
                raise CheckpointError(f"{called} is incomplete: {name} is missing.", "Convert the original again.")
            _copy(path / name, path, new)
            if _sha256(new / name) != digest:
                raise CheckpointError(f"{called}/{name} was changed or damaged since it was written.", "Convert again.")
            done += sizes[name]
            if progress is not None:
                progress(done, sum(sizes.values()))
        _copy(path / MANIFEST, path, new)
    return Report(out, prepared, recipe, carried=True)


def _refuse_changes(path: Path, manifest: Manifest, recipe: Recipe, dtype: mx.Dtype | None) -> None:
    recorded, origin = manifest.options, manifest.source.get("repo") or "the original checkpoint"
    called = provenance(path)[0] or path.name
    changes = []
    if recipe.base is not None and not recipe.gave(recorded["recipe"]):
        changes.append("other quantisation")
    if dtype is not None and dtype_name(dtype) != recorded["dtype"]:
        changes.append("another dtype")
    if changes:
        raise InputError(
            f"{called} is converted already; it cannot be converted to {' and '.join(changes)}.",
            f"Convert again from {origin}, or leave the options out to copy it.",
        )


def _copy(file: Path, folder: Path, new: Path) -> str:
    """Copy a file of `folder` to the same place in `new`; the name it has there."""
    name = file.relative_to(folder).as_posix()
    (new / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, new / name)
    return name


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Give freed memory back at once: every tensor has another size, so a cache of buffers would only grow."""
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
