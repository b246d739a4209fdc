"""What a Linux container lets this process take: memory and processor time, of cgroups v1 and v2.

A limit of any group that this process is in, or of one above it, counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

# Of each version: the limit, what is used, and what of that can be dropped at once.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_left() -> int | None:
    """Return the bytes that the groups leave; None where none has a limit.

    Pages of files that nobody uses do not count as used: they go when memory is wanted.
    """
    left: int | None = None
    for folder in _folders("memory"):
        for limit_file, used_file, droppable in _MEMORY:
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                used -= min(_entry(folder / "memory.stat", droppable), used)
                left = min(max(limit - used, 0), limit if left is None else left)
    return left


def cpu_quota() -> float | None:
    """Return how many processors' time the groups allow; None where none has a limit."""
    quota: float | None = None
    for folder in _folders("cpu"):
        time, period = _quota(folder)
        if time is not None and period and time > 0:
            quota = min(time / period, time / period if quota is None else quota)
    return quota


def _quota(folder: Path) -> tuple[int | None, int | None]:
    """Return the microseconds of each period, and the period."""
    words = _text(folder / "cpu.max").split()
    if len(words) == 2:
        return (int(words[0]) if words[0].isdigit() else None), int(words[1])
    return _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, and of those above them.

    A container may see its own group as the root while `MEMBERSHIP` has the host's path to it.
    """
    for line in _text(MEMBERSHIP).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = ROOT / controllers if controllers else ROOT
        if controllers and not root.is_dir():
            root = ROOT / controller
        yield root
        folder = root
        for part in Path(path).parts[1:]:
            folder /= part
            yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:  # no such file, or "max"
        return None


def _entry(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0
