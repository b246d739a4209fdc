"""How much memory this machine has to give."""

from __future__ import annotations

import os
from pathlib import Path

from octavo_core import cgroup

_MEMINFO = Path("/proc/meminfo")


def available_host_memory() -> int:
    """Return the bytes that a new process may take: what is free, within the container's limit.

    Where the system does not say what is free, all of its memory.
    """
    available = _meminfo("MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = cgroup.memory_left()
    return available if left is None else min(available, left)


def _meminfo(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # another system than Linux
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None
