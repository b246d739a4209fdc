"""Servers for the tests of client libraries, which have environments of their own.

`nox -s clients` makes these; OCTAVO_SERVER_PYTHON names the Python that has Octavo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SERVER_PYTHON = os.environ.get("OCTAVO_SERVER_PYTHON", sys.executable)


def _serving(*command: str) -> Iterator[str]:
    server = subprocess.Popen(
        [SERVER_PYTHON, *command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.environ.get("OCTAVO_SERVER_PYTHONPATH", "")},
    )
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert "://" in line, line
        yield line.split()[-1]
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model, ``script``, says what the first message tells it to."""
    folder = tmp_path_factory.mktemp("script")
    yield from _serving(str(HERE / "serve_script.py"), str(folder / "model"))


@pytest.fixture(scope="session")
def starter() -> Iterator[str]:
    """A server with the starter model, ``starter``, whose grammars are enforced."""
    flags = ("--port", "0", "--served-model-name", "starter", "--max-model-len", "2048")
    yield from _serving("-m", "octavo_server", "serve", *flags, "--kv-cache-memory", "512MiB")
