"""A folder that appears whole or not at all: written beside its place, synced to disk, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlxlin.errors import InputError, MlxlinError, ResourceError

MANIFEST = "mlxlin.json"
_LITTER = ("._", ".DS_Store")
_HERE = -100  # AT_FDCWD: names are relative to the current folder
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_target(out: Path) -> None:
    """Refuse an output path that holds something we did not write.

    Raises:
        InputError: a file; the folder one is in; a folder with files that no manifest of ours lists.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; the output must be a folder.", "Name another output folder.")
    if not out.is_dir():
        return
    ours = (out / MANIFEST).is_file()
    foreign = next((name for name in _unlisted(out) if not Path(name).name.startswith(_LITTER)), None)
    if foreign is not None and not ours:
        raise InputError(
            f"{out} exists, is not empty and was not written by mlxlin; it was left untouched.",
            "Name another output folder, or empty this one yourself.",
        )
    if foreign is not None:
        raise InputError(
            f"{out} holds {foreign}, which mlxlin did not write; the folder was left untouched.",
            "Name another output folder, or move that file.",
        )
    if Path.cwd().is_relative_to(out.resolve()):
        raise InputError(
            f"{out} is where this command runs; the output replaces its folder as a whole.", "Name another folder."
        )


def _unlisted(out: Path) -> Iterator[str]:
    """The files in a converted folder that its manifest does not list; whatever lies in any other folder."""
    if not (out / MANIFEST).is_file():
        yield from (path.name for path in out.iterdir())
        return
    listed = {MANIFEST, *_listed(out / MANIFEST)}
    present = (path.relative_to(out).as_posix() for path in sorted(out.rglob("*")) if not path.is_dir())
    yield from (name for name in present if name not in listed)


def _listed(manifest: Path) -> list[str]:
    try:
        return list(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{manifest} is damaged, so what else is in the folder is unclear; it was left untouched.",
            "Name another output folder, or remove this one yourself.",
        ) from error


def check_disk(out: Path, needed: int) -> None:
    """Refuse when the disk under `out` has less than `needed` bytes free.

    Raises:
        ResourceError: with both numbers.
    """
    place = next(parent for parent in [out.absolute(), *out.absolute().parents] if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ResourceError(
            f"{_size(needed)} will be written, but only {_size(free)} are free on the disk of {place}.",
            "Free some space, name an output on another disk, or quantise to fewer bits.",
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends well, and vanishes when it does not.

    A previous `out` of ours stays until the new one is complete. What a killed process left behind is removed.

    Raises:
        ResourceError: the disk is full, or another process is writing the same output.
    """
    out = out.resolve()
    check_target(out)
    temporary = out.parent / f".{out.name}.mlxlin-new"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(temporary):
            try:
                _clear(temporary)
                _restore(out)
                yield temporary
                _sync(temporary)
                _replace(temporary, out)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(
                f"The disk is full, or a size limit was hit, while writing {out.name}; nothing was left behind.",
                "Free some space and run the same command again.",
            ) from error
        raise MlxlinError(
            f"{out.name} could not be written: {error}", "Check the folder and its permissions."
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create `folder` and hold it; a process that died holds nothing, so what it left can be taken over."""
    name = folder.name.removeprefix(".").removesuffix(".mlxlin-new")
    while True:
        folder.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                handle = stack.enter_context(_held(folder))
            except BlockingIOError as error:
                raise ResourceError(f"Another process is writing {name} just now.", "Wait for it to finish.") from error
            if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
                yield
                return
        # else the folder was renamed into place between opening and locking it: try again


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _old(out: Path) -> Path:
    return out.parent / f".{out.name}.mlxlin-old"


def _restore(out: Path) -> None:
    """Undo a replacement that was cut short between its two renames; else remove what it left."""
    if _old(out).exists() and not out.exists():
        os.rename(_old(out), out)
    shutil.rmtree(_old(out), ignore_errors=True)


def _replace(folder: Path, out: Path) -> None:
    """Put `folder` in the place of `out`, in one step where the system can exchange two names."""
    if not out.exists() or not any(out.iterdir()):
        os.rename(folder, out)
        _sync_path(out.parent)
        return
    with _held(out):  # so that nobody takes over what the exchange leaves under the other name
        old = folder if _exchange(folder, out) else _renamed_twice(folder, out)
        _sync_path(out.parent)  # the new one is safe before the old one goes
        shutil.rmtree(old, ignore_errors=True)


def _renamed_twice(folder: Path, out: Path) -> Path:
    os.rename(out, _old(out))
    try:
        os.rename(folder, out)
    except OSError:
        os.rename(_old(out), out)
        raise
    return _old(out)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Lock a folder, under whatever name, until the block ends; raises BlockingIOError where another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders' names, so that each exists at every moment; False where system or disk cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(a), os.fsencode(b)
    if hasattr(libc, "renameat2"):  # Linux
        return bool(libc.renameat2(_HERE, names[0], _HERE, names[1], 2) == 0)
    if hasattr(libc, "renamex_np"):  # macOS
        return bool(libc.renamex_np(*names, 2) == 0)
    return False


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
