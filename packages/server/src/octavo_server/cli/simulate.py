"""``octavo simulate``: the simulator of core, with models by name and a measured cost model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from octavo_core.config import EngineConfig
from octavo_core.simulator import command
from octavo_core.simulator.cost_model import CostModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the simulator."""
    command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate, or measure what a simulation needs.

    Raises:
        OctavoError: A flag, the model or the trace can't be used.
    """
    return command.run(args, resolve_model=_resolve_model, calibrate=_calibrate)


def _resolve_model(config: EngineConfig) -> Path:
    from octavo_server.model_source import resolve_plan_source

    # Of a model of the hub, config.json is enough.
    return resolve_plan_source(config.model.model, config.model.revision).path


def _calibrate(config: EngineConfig, on_progress: Callable[[str], None]) -> CostModel:
    # Imports torch.
    from octavo_server.calibration import calibrate

    return calibrate(config, on_progress)
