"""Merges what a configuration is made of: flags, environment, file, defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo_core.config.engine import EngineConfig, apply_values
from octavo_core.config.option import options

ENVIRONMENT_PREFIX = "OCTAVO_"


def resolve_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    file: Mapping[str, tuple[Any, str]] | None = None,
) -> EngineConfig:
    """Merge flags or keywords, the environment, and a file's settings over the defaults.

    Args:
        flags: Flat field names to values; strings are parsed, None means not given.
        environ: Environment; only names of the form ``OCTAVO_<FIELD>`` are read.
        keywords: Like `flags`, for values that came as Python keywords.
        file: Like `flags`, each value with the words that say where it stands.

    Raises:
        ConfigError: Names the field, where its value came from, and the limit.
    """
    values: dict[str, tuple[Any, str]] = dict(file or {})
    for option in options():
        variable = ENVIRONMENT_PREFIX + option.name.upper()
        if environ is not None and variable in environ:
            values[option.name] = (environ[variable], f"environment {variable}")
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = (value, f"flag --{name.replace('_', '-')}")
    for name, value in (keywords or {}).items():
        if value is not None:
            values[name] = (value, f"keyword {name}")
    return apply_values(EngineConfig(), values)
