"""``octavo serve [MODEL]``: every field of the configuration is a flag."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from octavo_core.config import (
    ENVIRONMENT_PREFIX,
    GROUPS,
    EngineConfig,
    Option,
    options,
    resolve_config,
)
from octavo_core.errors import ConfigError
from octavo_server.cli.config_file import read_config_file

_CACHE_VARIABLE = "OCTAVO_CACHE_DIR"
_CONFIG_VARIABLE = "OCTAVO_CONFIG"
_EPILOG = (
    "Each flag can also be set as an environment variable, for example OCTAVO_MAX_NUM_SEQS for "
    "--max-num-seqs, or as a line `max-num-seqs: 64` of the --config file; a flag counts more than "
    "a variable, and that more than the file. OCTAVO_CACHE_DIR is the folder where the starter "
    "model is kept (default: octavo in the user's cache folder)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional model and one flag for each configuration field, in groups."""
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="folder, .gguf file or hub id (default: the built-in starter model)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings, by the names of the flags"
    )
    parser.usage = "octavo serve [MODEL] [flags]"
    parser.epilog = _EPILOG
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
    """Merge the parsed flags, the environment and the file that one of them names.

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
    _warn_of_mistyped_variables()
    path = args.config or os.environ.get(_CONFIG_VARIABLE)
    file = read_config_file(Path(path)) if path else {}
    return resolve_config(flags, os.environ, file=file)


def _warn_of_mistyped_variables() -> None:
    """Name variables that are almost a setting's. Others with our prefix may be somebody else's."""
    known = {ENVIRONMENT_PREFIX + option.name.upper() for option in options()}
    known |= {_CACHE_VARIABLE, _CONFIG_VARIABLE}
    unknown = [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]
    for name in sorted(set(unknown) - known):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if close:
            print(
                f"octavo serve: warning: {name} is no setting and is ignored; did you mean "
                f"{close[0]}?",
                file=sys.stderr,
            )


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    flag = "--" + option.name.replace("_", "-")
    kind = _unwrap(option.type)
    # argparse expands % in help texts.
    text = option.description.replace("%", "%%")
    if option.default not in (None, "", ()):
        default = ",".join(option.default) if option.is_list else option.default
        text += f" (default: {default})"
    if isinstance(kind, msgspec.inspect.BoolType):
        # Without this, argparse would show and set False where nothing was given.
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, dest=option.name, action=action, default=None, help=text)
        return
    if option.is_list:
        group.add_argument(
            flag, dest=option.name, metavar="TEXT", action="append", default=None, help=text
        )
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
