"""A fast BLAS for MLX's CPU backend on Linux.

The Linux wheel of MLX links the reference BLAS, which multiplies float32 matrices 20 to 50 times slower than
OpenBLAS. The symbols it calls (`cblas_sgemm` and its kin) are reached through libmlx's procedure linkage table, one
pointer each. We put the addresses of OpenBLAS's functions into those slots: nothing is copied, no file is written,
it works whether or not MLX has multiplied before, and where anything is not as expected MLX is left as it was.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCTS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
# ELF-64 constants (System V ABI): segment, dynamic tags, and the relocation type of a linkage-table slot by machine.
PT_LOAD, PT_DYNAMIC = 1, 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_JMPREL = 2, 5, 6, 23
JUMP_SLOT = {62: 7, 183: 1026}  # x86-64, aarch64


@dataclass(frozen=True)
class Blas:
    """The BLAS that serves MLX's matrix products on the CPU.

    Attributes:
        name: for people, e.g. "OpenBLAS 0.3.34 (SkylakeX)".
        fast: whether it is an optimised library.
        threads: threads it uses; 1 for the reference BLAS.
        note: what a person should know about it; empty where all is well.
    """

    name: str
    fast: bool
    threads: int
    note: str = ""


def install() -> Blas:
    """Route MLX's CPU matrix products to OpenBLAS; to be called once, after `mlx.core` was imported."""
    if sys.platform != "linux":
        return Blas("Accelerate", True, os.cpu_count() or 1)
    reference = "matrix products on the CPU run 20 to 50 times slower than they could"
    found = _openblas()
    if found is None:
        return Blas("reference BLAS", False, 1, f"no OpenBLAS found (pip install scipy-openblas32): {reference}")
    library, prefix = found
    try:
        slots = dict(_slots(_libmlx()))
        for name in PRODUCTS:
            _write_pointer(slots[name], ctypes.cast(getattr(library, prefix + name), ctypes.c_void_p).value or 0)
    except (OSError, KeyError, ValueError, struct.error) as error:
        return Blas("reference BLAS", False, 1, f"OpenBLAS could not be attached to this MLX ({error!r}): {reference}")
    threads = usable_cpus()
    getattr(library, prefix + "openblas_set_num_threads")(threads)
    version = getattr(library, prefix + "openblas_get_config")
    version.restype = ctypes.c_char_p
    core = getattr(library, prefix + "openblas_get_corename")
    core.restype = ctypes.c_char_p
    return Blas(f"{' '.join(version().decode().split()[:2])} ({core().decode()})", True, threads)


def usable_cpus() -> int:
    """How many processors this process may use (its affinity, not the machine's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _openblas() -> tuple[ctypes.CDLL, str] | None:
    """An OpenBLAS and the prefix of its symbols: the wheel's, else the system's."""
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("lib/libscipy_openblas*.so")):
            return ctypes.CDLL(str(path)), "scipy_"
    system = ctypes.util.find_library("openblas")
    return (ctypes.CDLL(system), "") if system else None


def _libmlx() -> Path:
    spec = importlib.util.find_spec("mlx")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / "lib" / "libmlx.so").exists():
            return path
    raise OSError("libmlx.so not found")


def _slots(path: Path) -> Iterator[tuple[str, int]]:
    """Name and address of every linkage-table slot of a loaded ELF library."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        if elf[:5] != b"\x7fELF\x02":
            raise ValueError("not a 64-bit ELF library")
        machine, header, count = (struct.unpack_from("<H", elf, 18)[0], struct.unpack_from("<Q", elf, 32)[0],
                                  struct.unpack_from("<H", elf, 56)[0])
        segments = [struct.unpack_from("<IIQQQQQQ", elf, header + 56 * i) for i in range(count)]

        def file_offset(address: int) -> int:
            for kind, _, offset, virtual, _, size, _, _ in segments:
                if kind == PT_LOAD and virtual <= address < virtual + size:
                    return int(offset + address - virtual)
            raise ValueError("address outside of the file")

        dynamic = next(s for s in segments if s[0] == PT_DYNAMIC)
        tags = dict(struct.unpack_from("<QQ", elf, dynamic[2] + i) for i in range(0, dynamic[5], 16))
        base = _load_address(path) - min(s[3] for s in segments if s[0] == PT_LOAD)
        start, symbols, strings = (file_offset(tags[t]) for t in (DT_JMPREL, DT_SYMTAB, DT_STRTAB))
        for at in range(start, start + tags[DT_PLTRELSZ], 24):
            slot, info, _ = struct.unpack_from("<QQq", elf, at)
            if info & 0xFFFFFFFF == JUMP_SLOT[machine]:
                name = strings + struct.unpack_from("<I", elf, symbols + 24 * (info >> 32))[0]
                yield elf[name : elf.find(b"\0", name)].decode(), base + slot


def _load_address(path: Path) -> int:
    """Where the library's first page is mapped in this process."""
    real = os.path.realpath(path)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].rstrip("\n") == real:
                return int(fields[0].split("-")[0], 16)
    raise OSError(f"{path.name} is not loaded")


def _write_pointer(address: int, value: int) -> None:
    """Store one pointer, making its page writable first (it is read-only where the library was linked so)."""
    page = address & ~(mmap.PAGESIZE - 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    ctypes.c_void_p.from_address(address).value = value
