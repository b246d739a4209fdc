"""Starts a real server as a user would, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT = 240.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def children_of(pid: int) -> list[int]:
    """All processes below `pid`, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents[int(entry.name)] = int(stat[1])
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def is_running(pid: int) -> bool:
    """True if there is such a process and it is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


class Server:
    """``octavo serve`` in a process of its own."""

    def __init__(self, *args: str, log: Path, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log
        with log.open("w") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "octavo_server", "serve", *args, "--port", str(self.port)],
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # so that a test can signal the whole group
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log}")
            if self._is_healthy():
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready in {START_TIMEOUT} s:\n{self.log}")

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:  # a 503 is one too
            return False

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def processes(self) -> list[int]:
        return [self.process.pid, *children_of(self.process.pid)]

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            for pid in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise


@contextlib.contextmanager
def running_server(*args: str, log: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(*args, log=log, env=env)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
