"""A server of one's own, which ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from octavo_client import APITimeoutError, Client, Health
from octavo_core.errors import EngineDeadError

HOST = "127.0.0.1"

_END_SECONDS = 15.0  # a server that has not ended by then is killed
_LAST_LINES = 15
_PR_SET_PDEATHSIG = 1


class LocalServer:
    """Runs ``octavo serve`` on a free port of this machine for as long as a block lasts.

    Args:
        model: As in ``octavo serve MODEL``; empty means the starter model.
        command: What starts a server, without host, port and model.

    Attributes:
        api_key: What the server asks for, so that it is not other users' of this machine.
    """

    def __init__(self, model: str = "", command: Sequence[str] | None = None) -> None:
        self._command = list(command or (sys.executable, "-m", "octavo_server", "serve"))
        self._model = [model] if model else []
        self._port = free_port()
        self.api_key = secrets.token_urlsafe(24)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open until the server has ended
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self._port}"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*self._command, *self._model, "--host", HOST, "--port", str(self._port)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=self._environment(),
            # A Ctrl-C in this terminal is for the answer that is being read, not for the server.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_ready(
        self, client: Client, on_progress: Callable[[Health], None], timeout: float = 600.0
    ) -> None:
        """Return when the server takes requests.

        Args:
            client: A client of this server.
            on_progress: Called a few times a second.
            timeout: Most seconds to wait.

        Raises:
            EngineDeadError: It ended, or was not ready in time; its last words are in the message.
        """

        def watch(health: Health) -> None:
            self.check_alive()
            on_progress(health)

        try:
            client.wait_until_ready(timeout, on_progress=watch)
        except APITimeoutError as error:
            raise EngineDeadError(f"{error}\n{self._last_lines()}") from error

    def check_alive(self) -> None:
        """Raise EngineDeadError if the server has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise EngineDeadError(f"the server ended with code {code}:\n{self._last_lines()}")

    def stop(self) -> None:
        """End the server and wait for its end. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # Its engine ends itself when the front is gone.
            process.kill()
            process.wait()
        self._output.close()

    def _environment(self) -> dict[str, str]:
        """Return our environment with the key, and without what would make it an https server."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_SSL_")
        }
        return inherited | {"OCTAVO_API_KEY": self.api_key}

    def _last_lines(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])


def free_port() -> int:
    """Return a TCP port that is free on this machine just now."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """Let Linux send this process a SIGTERM when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
