from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo_server.starter_model import starter_gguf
from octavo_server.tokenizer import Tokenizer, load_tokenizer
from support.front import FrontUnderTest
from support.scripted_engine import SAY_TEMPLATE
from support.tiny_models import write_folder, write_spm


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    """One front for all tests that only talk to it; who counts what it did starts another."""
    running = FrontUnderTest(
        tmp_path_factory.mktemp("front"), "run_scripted_engine", max_num_queued_reqs=64
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    """A front whose model says what it is told to, with calls as Hermes and Qwen write them."""
    running = FrontUnderTest(
        tmp_path_factory.mktemp("talker"),
        "run_scripted_engine",
        model={"chat_template": SAY_TEMPLATE, "max_position_embeddings": 8192},
        max_num_queued_reqs=64,
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def _fronts(parent: Path) -> Iterator[Any]:
    started: list[FrontUnderTest] = []

    def start(target: str = "run_scripted_engine", **settings: object) -> FrontUnderTest:
        folder = parent / f"front{len(started)}"
        folder.mkdir()
        started.append(FrontUnderTest(folder, target, **settings))
        return started[-1]

    yield start
    for front in started:
        front.stop()


@pytest.fixture
def start_front(tmp_path: Path) -> Iterator[Any]:
    """Start a front with its own settings; all are stopped after the test."""
    yield from _fronts(tmp_path)


@pytest.fixture(scope="module")
def start_shared_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a front with its own settings for the tests of one file."""
    yield from _fronts(tmp_path_factory.mktemp("fronts"))


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """The starter model's file, fetched once."""
    return starter_gguf()


@pytest.fixture(scope="session")
def starter_tokenizer(starter_path: Path) -> Tokenizer:
    return load_tokenizer(starter_path)


@pytest.fixture(scope="session")
def spm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spm(tmp_path_factory.mktemp("spm") / "spm.gguf")


@pytest.fixture(scope="session")
def spm_tokenizer(spm_path: Path) -> Tokenizer:
    return load_tokenizer(spm_path)


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """`write_folder` for one folder of the test's own."""
    return lambda **files: write_folder(tmp_path / "model", **files)
