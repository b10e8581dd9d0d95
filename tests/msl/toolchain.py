"""Finds clang, runs it, and keeps what it made in a cache folder that several processes may share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import CompileError

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"

HERE = Path(__file__).parent
SHIM = HERE / "shim"


@functools.cache
def clang() -> tuple[str, ...]:
    """Command of a clang that knows half, bfloat and their exact rounding: 19 or newer, or the one inside ziglang."""
    for version in range(25, 18, -1):
        if path := shutil.which(f"clang-{version}"):
            return (path,)
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise RuntimeError("the Metal emulator needs clang: pip install ziglang, or apt-get install clang-19")
    return (str(Path(spec.origin).parent / "zig"), "clang")


def is_zig() -> bool:
    return clang()[-1] == "clang"


def libc_headers() -> tuple[str, ...]:
    """Options that let clang find the headers of the C library: ziglang carries its own."""
    if not is_zig():
        return ()
    lib = Path(clang()[0]).parent / "lib"
    libc = [f"libc/include/{name}" for name in ("x86-linux-gnu", "generic-glibc", "x86-linux-any", "any-linux-any")]
    includes = [option for name in ("include", *libc) for option in ("-isystem", str(lib / name))]
    return ("--target=x86_64-linux-gnu", "-nostdinc", *includes)


@functools.cache
def cache_folder() -> Path:
    default = Path(tempfile.gettempdir()) / f"mlxlin-msl-{os.getuid()}"
    folder = Path(os.environ.get("MLXLIN_MSL_CACHE", default))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def run(command: Sequence[str]) -> tuple[int, str]:
    """(exit code, everything printed)."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return result.returncode, result.stdout


def run_or_fail(command: Sequence[str], what: str) -> None:
    code, output = run(command)
    if code:
        raise CompileError(f"{what} failed:\n{output}")


def digest(*parts: str | bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode() if isinstance(part, str) else part)
        h.update(b"\0")
    return h.hexdigest()[:24]


def folder_digest(folder: Path) -> str:
    return digest(*(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()))


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, filled once by `build(folder)`; complete or absent, never half-made."""
    target = cache_folder() / name
    if target.is_dir():
        return target
    scratch = Path(tempfile.mkdtemp(dir=cache_folder(), prefix=f"{name}."))
    try:
        build(scratch)
        with contextlib.suppress(OSError):  # another process may have been faster
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def cached_file(name: str, build: Callable[[Path], object]) -> Path:
    """The same for one file whose final path matters to the compiler."""
    target = cache_folder() / name
    if not target.is_file():
        scratch = target.with_name(f"{name}.{os.getpid()}")
        build(scratch)
        scratch.replace(target)
    return target


def link(objects: Sequence[Path], library: Path) -> None:
    """A shared library whose runtime symbols are resolved when it is loaded."""
    command = (clang()[0], "ld.lld") if is_zig() else (*clang(), "-nostdlib")
    run_or_fail([*command, "-shared", *map(str, objects), "-o", str(library)], "linking")
