"""``python -m octavo_core COMMAND``: what core can do without the other packages."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo_core import __version__
from octavo_core.errors import OctavoError

# Command to its module and its line in the help. The module has `add_arguments(parser)` and
# `run(args) -> int`, and is imported when it is called.
COMMANDS = {
    "plan": ("octavo_core.plan_command", "what of a model fits on a device"),
}

EXIT_USAGE = 2


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Returns:
        The command's exit code; 2 for a mistake of the user's.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _OneLineParser(prog="python -m octavo_core", description=__doc__)
    parser.add_argument("-V", "--version", action="version", version=f"octavo-core {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, line) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line)
        if arguments and arguments[0] == name:
            importlib.import_module(module).add_arguments(subparser)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except OctavoError as error:
        print(f"{parser.prog} {args.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
