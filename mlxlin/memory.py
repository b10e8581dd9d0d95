"""How much memory is free for weights: what the system, a container or a limit of this process leaves."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from mlxlin.backend import memory_bytes, mx, on_metal

_CGROUP = Path("/sys/fs/cgroup")
_SHARE_OF_MAC = 0.75  # of physical memory, where Metal states no working set of its own


def available_bytes() -> int:
    """Bytes that may still be taken without swapping or being killed."""
    if sys.platform == "darwin":
        limit = int(mx.device_info().get("max_recommended_working_set_size", 0)) if on_metal() else 0
        return (limit or int(_SHARE_OF_MAC * memory_bytes())) - mx.get_active_memory()
    return max(0, min(_system(), _container(), _process()))


def _system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return memory_bytes()


def _container() -> int:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return sys.maxsize if limit == "max" else int(limit) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize


def _process() -> int:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit - pages * resource.getpagesize()
