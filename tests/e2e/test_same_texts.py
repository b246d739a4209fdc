"""A model says the same however it is divided, and wherever its workers run.

Through a Ray cluster: `tests/ray`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support import same_texts
from support.server import command_line

pytestmark = pytest.mark.timeout(300)

TP2, PP2 = ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")
WAYS = {
    "uni": (("--distributed-executor-backend", "uni"), 1, 0),
    "mp": (("--distributed-executor-backend", "mp"), 1, 1),
    "TP2": (TP2, 1, 2),
    "PP2": (PP2, 1, 2),
    "TP2 x PP2": ((*TP2, *PP2), 1, 4),
    "DP2": (("--data-parallel-size", "2"), 2, 0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return same_texts.save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of a server without any of these flags."""
    found = same_texts.texts(folder, tmp_path_factory.mktemp("one") / "log")
    assert len(set(found)) == same_texts.NUM_TEXTS
    return found


@pytest.mark.parametrize(("flags", "num_engines", "num_workers"), WAYS.values(), ids=WAYS)
def test_the_same_texts(
    folder: Path,
    expected: list[str],
    tmp_path: Path,
    flags: tuple[str, ...],
    num_engines: int,
    num_workers: int,
) -> None:
    with same_texts.running(folder, tmp_path / "log", *flags) as server:
        titles = [command_line(pid) for pid in server.processes]
        assert sum(title.startswith("octavo: engine") for title in titles) == num_engines
        assert sum(title.startswith("octavo: worker") for title in titles) == num_workers
        assert same_texts.ask(server.url) == expected
