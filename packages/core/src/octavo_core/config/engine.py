"""Everything an engine is told, in one frozen struct."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo_core.config.access import AccessConfig
from octavo_core.config.cache import CacheConfig
from octavo_core.config.device import DeviceConfig
from octavo_core.config.limits import LimitsConfig
from octavo_core.config.model import ModelConfig
from octavo_core.config.observability import ObservabilityConfig
from octavo_core.config.option import GROUPS, options
from octavo_core.config.parallel import ParallelConfig
from octavo_core.config.parse import parse_value
from octavo_core.config.scheduler import SchedulerConfig
from octavo_core.config.server import ServerConfig
from octavo_core.errors import ConfigError


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine is told at start-up. It crosses the wire once, in the handshake.

    Attributes:
        model_path: Local folder or .gguf file that ``model.model`` was resolved to.
        sources: For each field that is not a default, where its value came from.
    """

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    model_path: str = ""
    sources: dict[str, str] = {}

    def replace(self, source: str, **values: Any) -> EngineConfig:
        """Return a copy with some fields set, remembering `source` for each.

        Args:
            source: Where the values come from, for example ``"the model's config.json"``.
            values: Flat field names of any group.

        Raises:
            ConfigError: A name is unknown or a value is outside its limits.
        """
        return apply_values(self, {name: (value, source) for name, value in values.items()})

    def source_of(self, name: str) -> str:
        """Say where the value of `name` came from."""
        return self.sources.get(name, "default")

    def without_secrets(self) -> EngineConfig:
        """Return a copy for other processes and for logs, which have no use for keys."""
        config = self
        for option in options():
            if option.is_secret:
                group = getattr(config, option.group)
                group = msgspec.structs.replace(group, **{option.name: option.default})
                config = msgspec.structs.replace(config, **{option.group: group})
        return config


def apply_values(config: EngineConfig, values: Mapping[str, tuple[Any, str]]) -> EngineConfig:
    """Return `config` with some fields set, by flat name: each a value and where it came from.

    Raises:
        ConfigError: A name is unknown or a value is outside its limits.
    """
    known = {option.name: option for option in options()}
    groups = {group: msgspec.structs.asdict(getattr(config, group)) for group in GROUPS}
    sources = dict(config.sources)
    model_path = config.model_path
    for name, (value, source) in values.items():
        sources[name] = source
        if name == "model_path":
            model_path = value
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ConfigError(f"{source}: there is no setting named {name}{hint}", field=name)
        option = known[name]
        groups[option.group][name] = parse_value(option, value, source)
    built: dict[str, Any] = {
        group: msgspec.convert(fields, GROUPS[group]) for group, fields in groups.items()
    }
    return EngineConfig(**built, model_path=model_path, sources=sources)
