"""From arguments to a sub-command, and from errors to one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from octavo_server import __version__
from octavo_server.cli.vllm_flags import explain_flag, split_needless

# Command to its line in the help. The module of the same name in this package has
# `add_arguments(parser)` and `run(args) -> int`, and is imported when it is called.
COMMANDS = {
    "serve": "start an OpenAI-compatible server",
    "chat": "chat with a model in the terminal",
    "run-batch": "answer a file of requests",
    "plan": "say what of a model fits on a device",
    "simulate": "replay a trace through the scheduler on a device that need not be there",
    "doctor": "say what this machine is, and what is not yet compiled",
}

EXIT_FAILURE = 1
EXIT_USAGE = 2


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line instead of a page of usage."""

    def __init__(self, **kwargs: Any) -> None:
        # An abbreviation that works today would break when a longer flag is added.
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Print `message` with the way to the help, and exit with code 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def run_command(arguments: Sequence[str]) -> int:
    """Parse `arguments` and run the sub-command that they name.

    Returns:
        Exit code of the sub-command; 2 for a mistake in flags or configuration and
        1 for any other error that is the user's to mend, both told in one line.
    """
    from octavo_core.errors import ConfigError, OctavoError

    command = next((word for word in arguments if not word.startswith("-")), None)
    parser, subparsers = build_parser(command)
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None:
        parser.print_help()
        return EXIT_USAGE
    chosen = subparsers[args.command]
    unknown, notes = split_needless(unknown) if args.command == "serve" else (unknown, [])
    if unknown:
        first = next((word for word in unknown if word.startswith("-")), unknown[0])
        chosen.error(_unknown_message(first, chosen))
    for note in notes:
        print(f"{chosen.prog}: note: {note}", file=sys.stderr)
    try:
        return int(_module(args.command).run(args))
    except OctavoError as error:
        print(f"{chosen.prog}: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE
    except KeyboardInterrupt:
        return 130


def build_parser(
    command: str | None,
) -> tuple[OneLineParser, dict[str, argparse.ArgumentParser]]:
    """Build the parser, with the arguments of `command` alone: others stay unimported.

    Returns:
        The parser, and the sub-command parsers by name.
    """
    parser = OneLineParser(prog="octavo", description="Serve large language models.")
    parser.add_argument("-V", "--version", action="version", version=f"octavo {__version__}")
    actions = parser.add_subparsers(dest="command", metavar="COMMAND")
    subparsers: dict[str, argparse.ArgumentParser] = {}
    for name, line in COMMANDS.items():
        subparsers[name] = actions.add_parser(name, help=line, description=_sentence(line))
        if name == command:
            _module(name).add_arguments(subparsers[name])
    return parser, subparsers


def _module(command: str) -> Any:
    return importlib.import_module(f"octavo_server.cli.{command.replace('-', '_')}")


def _sentence(line: str) -> str:
    # Not `capitalize`, which makes the rest lower case.
    return line[0].upper() + line[1:] + "."


def _unknown_message(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    flag = argument.split("=")[0]
    theirs = explain_flag(flag) if parser.prog.endswith(" serve") else None
    if theirs is not None:
        return theirs
    close = difflib.get_close_matches(flag, list(_flags(parser)), n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"there is no flag {flag}{hint}"


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
