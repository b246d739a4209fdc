"""``octavo serve [MODEL]``: every field of the configuration is a flag."""

from __future__ import annotations

import argparse
import os
from typing import Any

import msgspec

from octavo_core.config import GROUPS, EngineConfig, Option, options, resolve_config
from octavo_core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional model and one flag for each configuration field, in groups."""
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="folder, .gguf file or hub id (default: the built-in starter model)",
    )
    defaults = EngineConfig()
    groups = {
        name: parser.add_argument_group(name, type(getattr(defaults, name)).__doc__)
        for name in GROUPS
    }
    for option in options():
        _add_flag(groups[option.group], option)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; see `octavo_server.front.run_front` for the exit codes.

    Raises:
        OctavoError: The server could not start.
    """
    config = config_from_arguments(args)
    from octavo_server.front import run_front

    return run_front(config)


def config_from_arguments(args: argparse.Namespace) -> EngineConfig:
    """Merge the parsed flags and the environment.

    Raises:
        ConfigError: A value is wrong, or the model was given twice.
    """
    flags = {option.name: getattr(args, option.name) for option in options()}
    positional = args.model_argument
    if positional is not None:
        if flags["model"] not in (None, positional):
            raise ConfigError(
                f"the model is given twice: {positional!r} and --model {flags['model']!r}.",
                field="model",
            )
        flags["model"] = positional
    return resolve_config(flags, os.environ)


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    flag = "--" + option.name.replace("_", "-")
    kind = _unwrap(option.type)
    # argparse expands % in help texts.
    text = option.description.replace("%", "%%")
    if option.default not in (None, ""):
        text += f" (default: {option.default})"
    if isinstance(kind, msgspec.inspect.BoolType):
        # Without this, argparse would show and set False where nothing was given.
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, dest=option.name, action=action, default=None, help=text)
        return
    # Values stay strings here: `resolve_config` parses and checks them for all sources alike.
    group.add_argument(flag, dest=option.name, metavar=_metavar(kind), default=None, help=text)


def _unwrap(field_type: Any) -> Any:
    """Return the type inside annotations and ``| None``."""
    while isinstance(field_type, msgspec.inspect.Metadata):
        field_type = field_type.type
    if isinstance(field_type, msgspec.inspect.UnionType):
        inner = [t for t in field_type.types if not isinstance(t, msgspec.inspect.NoneType)]
        return _unwrap(inner[0])
    return field_type


def _metavar(kind: Any) -> str:
    if isinstance(kind, msgspec.inspect.LiteralType):
        return "{" + ",".join(str(value) for value in kind.values) + "}"
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return "N"
    return "TEXT"
