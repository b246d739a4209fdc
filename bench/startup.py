"""How long a server takes from the command to its first answer.

    nox -s bench -- startup
    nox -s bench -- startup --runs 5 --limit 8 -- path/to/model --block-size 8

Each run starts a server of its own, watches ``/health`` for the stages of the
start-up, asks for one short chat answer and ends the server. The first run is
not counted: it may download the model and fill the disk cache.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from octavo_client import Client, Health, OctavoClientError

MESSAGES = [{"role": "user", "content": "Say hello."}]


@dataclass
class Run:
    """One start. All times are seconds since the command was given.

    Attributes:
        stages: When each stage of the start-up was first seen.
        ready: When ``/health`` said 200.
        answered: When the first answer was there.
    """

    stages: dict[str, float] = field(default_factory=dict)
    ready: float = 0.0
    answered: float = 0.0


class ServerEndedError(Exception):
    """The server ended before it was ready."""


def main() -> int:
    arguments = parse_arguments()
    command = [*shlex.split(arguments.command), *arguments.server_arguments]
    for _ in range(arguments.warm_ups):
        measure(command, arguments.timeout)
    runs = [measure(command, arguments.timeout) for _ in range(arguments.runs)]
    for number, run in enumerate(runs, 1):
        print(describe(number, run), flush=True)
    median = statistics.median(run.answered for run in runs)
    verdict = "within" if median <= arguments.limit else "OVER"
    print(f"median {median:.2f} s to the first answer, {verdict} the limit of {arguments.limit:g}")
    return 0 if median <= arguments.limit else 1


def parse_arguments() -> argparse.Namespace:
    octavo = Path(sys.executable).with_name("octavo")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="counted starts (default: 3)")
    parser.add_argument("--warm-ups", type=int, default=1, help="starts before them (default: 1)")
    parser.add_argument("--limit", type=float, default=8.0, help="seconds allowed (default: 8)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until a start fails")
    parser.add_argument(
        "--command",
        default=f"{shlex.quote(str(octavo))} serve",
        help="what starts the server, for example '.venv/bin/nox -s serve --'",
    )
    parser.add_argument("server_arguments", nargs="*", help="further arguments of the server")
    return parser.parse_args()


def measure(command: Sequence[str], timeout: float) -> Run:
    """Start a server, get one answer and end it.

    Raises:
        ServerEndedError: The server ended by itself; its last words are in the message.
    """
    port = free_port()
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return first_answer(server, port, start, timeout)
        except (ServerEndedError, OctavoClientError) as error:
            raise SystemExit(f"{error}\n{last_lines(output)}") from error
        finally:
            end(server)


def first_answer(server: subprocess.Popen[bytes], port: int, start: float, timeout: float) -> Run:
    run = Run()

    def note(health: Health) -> None:
        if server.poll() is not None:
            raise ServerEndedError(f"the server ended with exit code {server.returncode}")
        if health.stage:
            run.stages.setdefault(health.stage, time.perf_counter() - start)

    with Client(f"http://127.0.0.1:{port}", max_retries=0) as client:
        client.wait_until_ready(timeout, interval=0.02, on_progress=note)
        run.ready = time.perf_counter() - start
        client.chat(MESSAGES, max_tokens=8, temperature=0.0)
        run.answered = time.perf_counter() - start
    return run


def end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        raise


def describe(number: int, run: Run) -> str:
    stages = [f"{when:.2f} {stage}" for stage, when in run.stages.items()]
    return f"run {number}: " + ", ".join(
        [*stages, f"{run.ready:.2f} ready", f"{run.answered:.2f} answered"]
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def last_lines(output: IO[bytes], count: int = 20) -> str:
    output.seek(0)
    return "\n".join(output.read().decode("utf-8", "replace").splitlines()[-count:])


if __name__ == "__main__":
    sys.exit(main())
