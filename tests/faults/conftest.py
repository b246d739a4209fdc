from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.faults import Target
from support.front import FrontUnderTest


@pytest.fixture
def start_front(tmp_path: Path) -> Iterator[Any]:
    """Start a front on the scripted engine with its own settings; all are stopped at the end."""
    started: list[FrontUnderTest] = []

    def start(target: str = "run_scripted_engine", **settings: object) -> FrontUnderTest:
        folder = tmp_path / f"front{len(started)}"
        folder.mkdir()
        started.append(FrontUnderTest(folder, target, **settings))
        return started[-1]

    yield start
    for front in started:
        front.stop()


@pytest.fixture
def start_target(start_front: Any) -> Any:
    """Like `start_front`, but wait until it is ready and return it as a `Target`."""

    def start(target: str = "run_scripted_engine", **settings: object) -> Target:
        front = start_front(target, **settings).wait_ready()
        return Target(front.url, front.process.pid)

    return start


@pytest.fixture(scope="module")
def shared_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One front for the tests of a file that only talk to it."""
    front = FrontUnderTest(tmp_path_factory.mktemp("front"), "run_scripted_engine")
    try:
        yield Target(front.wait_ready().url, front.process.pid)
    finally:
        front.stop()
