"""From flags to what a replica is: its step times, its KV blocks and its longest request."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError
from octavo_core.simulator.cost_model import CostModel, read_cost_model


class Hardware(NamedTuple):
    """One replica's device with a model on it."""

    cost_model: CostModel
    num_blocks: int
    max_model_len: int


def resolve_hardware(
    args: argparse.Namespace,
    config: EngineConfig,
    resolve_model: Callable[[EngineConfig], Path] | None,
) -> Hardware:
    """Choose a cost model and plan the KV cache.

    Raises:
        ConfigError: Too little is given.
        ModelError: The model can't be read.
    """
    if args.cost_model is None:
        raise ConfigError("give --cost-model FILE.", field="cost_model")
    num_blocks = config.cache.num_gpu_blocks_override
    if num_blocks is None:
        raise ConfigError("give --num-gpu-blocks-override N.", field="num_gpu_blocks_override")
    return Hardware(
        read_cost_model(args.cost_model),
        num_blocks,
        config.model.max_model_len or num_blocks * config.cache.block_size,
    )
