"""``octavo plan [MODEL]``: what fits on a device, before anything is downloaded."""

from __future__ import annotations

import argparse
import sys

from octavo_core.errors import ModelError
from octavo_core.plan_command import add_flags, read_plan_source, run_plan

EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional model and the planner's flags."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="",
        help="folder, config.json, .gguf file or hub id, of which only config.json is fetched "
        "(default: the built-in starter model)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model from the hub")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, and print the plan.

    Returns:
        0 if the model fits, 1 if it does not, 2 if it can't be found or read.

    Raises:
        ConfigError: A flag has a wrong value.
    """
    from octavo_server.model_source import resolve_plan_source

    try:
        found = resolve_plan_source(args.model, args.revision)
        return run_plan(args, read_plan_source(found.path, found.name))
    except ModelError as error:
        # 1 says that the model does not fit.
        print(f"octavo plan: error: {error}", file=sys.stderr)
        return EXIT_USAGE
