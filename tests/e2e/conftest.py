from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_server.starter_model import starter_gguf
from support.server import Server, running_server


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """The starter model's file, fetched once."""
    return starter_gguf()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server on the starter model for all tests that only talk to it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log=log) as running:
        yield running
