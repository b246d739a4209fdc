"""The settings one by one, as the command line and the documentation show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from octavo_core.config.access import AccessConfig
from octavo_core.config.cache import CacheConfig
from octavo_core.config.device import DeviceConfig
from octavo_core.config.limits import LimitsConfig
from octavo_core.config.model import ModelConfig
from octavo_core.config.observability import ObservabilityConfig
from octavo_core.config.parallel import ParallelConfig
from octavo_core.config.scheduler import SchedulerConfig
from octavo_core.config.server import ServerConfig

GROUPS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "parallel": ParallelConfig,
    "server": ServerConfig,
    "access": AccessConfig,
    "limits": LimitsConfig,
    "observability": ObservabilityConfig,
}
"""The fields of `EngineConfig` that are groups of settings, in the order of the help."""


class Option(NamedTuple):
    """One field of one group, as the command line and the documentation show it.

    Attributes:
        unit: ``bytes`` or ``tokens`` if it may be given as ``4GiB`` or ``8k``, else empty.
        is_secret: Its value is shown to nobody.
    """

    group: str
    name: str
    type: Any
    default: Any
    description: str
    is_list: bool = False
    is_secret: bool = False
    unit: str = ""


def options() -> Iterator[Option]:
    """Yield every configuration field, group by group."""
    for group, struct in GROUPS.items():
        info = msgspec.inspect.type_info(struct)
        assert isinstance(info, msgspec.inspect.StructType)
        for field in info.fields:
            description, extra = _metadata(field.type)
            yield Option(
                group,
                field.name,
                field.type,
                field.default,
                description,
                is_list=isinstance(bare_type(field.type), msgspec.inspect.VarTupleType),
                is_secret=extra.get("secret", False),
                unit=extra.get("unit", ""),
            )


def bare_type(field_type: Any) -> Any:
    """Return the type inside annotations."""
    while isinstance(field_type, msgspec.inspect.Metadata):
        field_type = field_type.type
    return field_type


def _metadata(field_type: Any) -> tuple[str, dict[str, Any]]:
    """Return the description and the extras that `Meta` gave to a field."""
    if not isinstance(field_type, msgspec.inspect.Metadata):
        return "", {}
    schema = field_type.extra_json_schema or {}
    return schema.get("description", ""), field_type.extra or {}
