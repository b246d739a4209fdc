from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.scripted_server import Reply, ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


@pytest.fixture
def reply() -> type[Reply]:
    return Reply
