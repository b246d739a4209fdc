"""The ``octavo`` command.

A spawned engine process imports this module again under another name, and
``octavo --version`` answers from it alone, so it imports next to nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None takes the process's own.

    Returns:
        Exit code: 0 success, 1 failure, 2 a mistake in flags or configuration.
    """
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-V"]):
        from octavo_server import __version__

        print(f"octavo {__version__}")
        return 0

    from octavo_server.cli.parser import run_command

    return run_command(arguments)


def _open_standard_streams() -> None:
    """Let streams that are closed lead nowhere: else a socket would get the number of one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for good


if __name__ == "__main__":
    sys.exit(main())
