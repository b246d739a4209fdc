"""The frozen configuration of an engine, and where each of its values came from.

Each field is a flag (``--max-num-seqs``), an environment variable
(``OCTAVO_MAX_NUM_SEQS``) and a keyword of ``LLM(...)``. Names are unique over
all groups, so one flat mapping fills them all:

    config = resolve_config(flags={"block_size": "8"}, environ=os.environ)
    config.cache.block_size          # 8
    config.sources["block_size"]     # "flag --block-size"

An earlier source wins over a later one: flag, environment, configuration file,
default. What the model's own files say fills in the values that are still None
(see `EngineConfig.replace`).
"""

from octavo_core.config.access import AccessConfig
from octavo_core.config.cache import CacheConfig
from octavo_core.config.device import DeviceConfig
from octavo_core.config.engine import EngineConfig
from octavo_core.config.limits import LimitsConfig
from octavo_core.config.model import ModelConfig
from octavo_core.config.observability import ObservabilityConfig
from octavo_core.config.option import GROUPS, Option, options
from octavo_core.config.parallel import ParallelConfig
from octavo_core.config.parse import parse_quantity
from octavo_core.config.resolve import ENVIRONMENT_PREFIX, resolve_config
from octavo_core.config.scheduler import SchedulerConfig
from octavo_core.config.server import ServerConfig

__all__ = [
    "ENVIRONMENT_PREFIX",
    "GROUPS",
    "AccessConfig",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "LimitsConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "Option",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "options",
    "parse_quantity",
    "resolve_config",
]
