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
import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCTS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
# ELF-64 (System V ABI): tags of the dynamic section, and the relocation type of a linkage-table slot by machine.
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_JMPREL = 2, 5, 6, 23
JUMP_SLOT = {"x86_64": 7, "aarch64": 1026}


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
    if not os.environ.get("OPENBLAS_NUM_THREADS"):  # a number given from outside holds
        getattr(library, prefix + "openblas_set_num_threads")(idle_cpus())
    threads = int(getattr(library, prefix + "openblas_get_num_threads")())
    version = getattr(library, prefix + "openblas_get_config")
    version.restype = ctypes.c_char_p
    core = getattr(library, prefix + "openblas_get_corename")
    core.restype = ctypes.c_char_p
    return Blas(f"{' '.join(version().decode().split()[:2])} ({core().decode()})", True, threads)


def idle_cpus() -> int:
    """How many of the processors this process may use have nothing to do now; at least 1.

    OpenBLAS's threads wait for each other by spinning. Where they are more than the idle processors, each product waits
    for a thread that is not running: decoding took 9 times as long with 2 threads as with 1 on 2 busy processors.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable - round(os.getloadavg()[0]))


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
    """Name and address of every linkage-table slot of a loaded ELF library.

    The dynamic loader's handle is its `struct link_map { l_addr; l_name; l_ld; ... }`: the load address and the
    dynamic section, whose tables name the slots.
    """
    load_address, _, dynamic = struct.unpack("<QQQ", ctypes.string_at(ctypes.CDLL(str(path))._handle, 24))
    tags: dict[int, int] = {}
    while (entry := struct.unpack("<QQ", ctypes.string_at(dynamic, 16)))[0] != 0:
        tags[entry[0]], dynamic = entry[1], dynamic + 16
    # glibc has relocated the addresses in the section, musl has not
    jumps, symbols, strings = (
        tags[t] if tags[t] >= load_address else tags[t] + load_address for t in (DT_JMPREL, DT_SYMTAB, DT_STRTAB)
    )
    for at in range(jumps, jumps + tags[DT_PLTRELSZ], 24):
        slot, info, _ = struct.unpack("<QQq", ctypes.string_at(at, 24))
        if info & 0xFFFFFFFF == JUMP_SLOT[platform.machine()]:
            name = strings + struct.unpack("<I", ctypes.string_at(symbols + 24 * (info >> 32), 4))[0]
            yield ctypes.string_at(name).decode(), load_address + slot


def _write_pointer(address: int, value: int) -> None:
    """Store one pointer, making its page writable first (it is read-only where the library was linked so)."""
    page = address & ~(mmap.PAGESIZE - 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    ctypes.c_void_p.from_address(address).value = value
