"""``--config FILE``: settings in YAML, by the names of the flags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo_core.errors import ConfigError

_MAX_BYTES = 1 << 20


def read_config_file(path: Path) -> dict[str, tuple[Any, str]]:
    """Read settings from a file: one mapping, ``max-num-seqs: 64`` or ``max_num_seqs: 64``.

    Returns:
        For each field its value and the words that say where it stands.

    Raises:
        ConfigError: The file can't be read or is no such mapping.
    """
    settings: dict[str, tuple[Any, str]] = {}
    for name, value, line in _entries(path):
        field = name.removeprefix("--").replace("-", "_")
        place = f"{path} line {line}"
        if field in settings:
            raise ConfigError(
                f"--config {path}: line {line} gives {name} again; keep one of the two.",
                field="config",
            )
        if value is not None:
            settings[field] = (value, place)
    return settings


def _entries(path: Path) -> Iterator[tuple[str, Any, int]]:
    # The import takes 20 ms, and few servers have such a file.
    import yaml

    try:
        loader = yaml.SafeLoader(_read(path))
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise _unusable(path, "it must be a mapping, of lines such as `port: 8001`")
        for key_node, value_node in root.value:
            name = loader.construct_object(key_node, deep=True)
            value = loader.construct_object(value_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(name, str):
                raise _unusable(path, f"line {line} has the key {name!r}, which is no text")
            if isinstance(value, dict):
                raise _unusable(path, f"line {line}: {name} must not be a mapping; it is flat")
            yield name, value, line
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _unusable(path, f"{place}{problem}") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(path, os.strerror(error.errno or 0).lower()) from None
    if len(data) > _MAX_BYTES:
        raise _unusable(path, f"it is larger than {_MAX_BYTES} bytes")
    return data


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"--config {path}: {reason}.", field="config")
