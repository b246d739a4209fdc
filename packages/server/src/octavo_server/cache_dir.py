"""Where files that can be made again are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Return Octavo's cache folder, which need not exist yet.

    It is ``OCTAVO_CACHE_DIR`` if that is set, else the place for caches of the user's system.
    """
    override = os.environ.get("OCTAVO_CACHE_DIR")
    if override:
        return Path(override).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("octavo", appauthor=False))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that others see all of it or nothing.

    Raises:
        OSError: The folder can't be made or written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
