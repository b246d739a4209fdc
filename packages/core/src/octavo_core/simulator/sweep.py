"""Settings to compare: every combination of the values that are given for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from octavo_core.config import options
from octavo_core.errors import ConfigError
from octavo_core.router import ROUTERS

# What a sweep can vary beyond the scheduler's and the cache's own settings.
DEPLOYMENT_FIELDS = ("replicas", "router")


class SweepAxis(NamedTuple):
    """One setting and its values, as they were written."""

    field: str
    values: tuple[str, ...]


def sweepable_fields() -> list[str]:
    """Return the names that a sweep can vary."""
    fields = [option.name for option in options() if option.group in ("scheduler", "cache")]
    return [*fields, "max_model_len", *DEPLOYMENT_FIELDS]


def parse_sweep(text: str) -> SweepAxis:
    """Read ``max_num_batched_tokens=512,2048,8192``.

    Raises:
        ConfigError: It is not of that form, or there is no such setting.
    """
    field, equals, values = text.partition("=")
    field = field.strip().lstrip("-").replace("-", "_")
    items = tuple(value.strip() for value in values.split(","))
    if not equals or not all(items):
        raise ConfigError(
            f"sweep is {text!r}; write it like max_num_batched_tokens=512,2048,8192.",
            field="sweep",
        )
    if field not in sweepable_fields():
        raise ConfigError(
            f"sweep is {text!r}, but there is no setting {field}; there are "
            f"{', '.join(sweepable_fields())}.",
            field="sweep",
        )
    if field == "router" and not set(items) <= set(ROUTERS):
        raise ConfigError(
            f"sweep is {text!r}, but the routers are {', '.join(ROUTERS)}.", field="sweep"
        )
    return SweepAxis(field, items)


def combinations(axes: Sequence[SweepAxis]) -> list[dict[str, str]]:
    """Return every combination, the last axis changing fastest; one empty one without axes."""
    names = [axis.field for axis in axes]
    if len(set(names)) != len(names):
        raise ConfigError(f"sweep names a setting twice: {', '.join(names)}.", field="sweep")
    products = itertools.product(*(axis.values for axis in axes))
    return [dict(zip(names, values, strict=True)) for values in products]


def parse_count(name: str, value: str | int) -> int:
    """Read a positive whole number.

    Raises:
        ConfigError: It is none.
    """
    try:
        count = msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        count = 0
    if count < 1:
        raise ConfigError(
            f"{name} is {value!r}; it must be a whole number, at least 1.", field=name
        )
    return count
