"""Promise: files that can't be read, and disks that are full, are told of in plain words.

What can't be kept costs time at each start, and no more. What can't be read ends the start with
one line that names the file. Damaged weights are in `tests/worker/test_damaged_weights.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo_server.starter_model import starter_gguf
from support.front import FrontUnderTest
from support.scripted_engine import write_byte_model


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """The starter model's file, fetched once, before a test has another cache folder."""
    return starter_gguf()


@pytest.fixture(params=["a full disk", "a file in its place"])
def unusable_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A cache folder that nothing can be put into."""
    folder = tmp_path / "cache"
    if request.param == "a file in its place":
        folder.touch()
        yield folder
        return
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can't be mounted here")
    try:
        with pytest.raises(OSError, match="No space left"):
            (folder / "filler").write_bytes(bytes(32 * 1024))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_cache_that_takes_nothing_costs_a_warning(
    start_front: Any, starter_path: Path, unusable_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted tokenizer of a GGUF file is kept there, if it can be."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(unusable_cache))
    front = start_front(model=str(starter_path), max_model_len=16).wait_ready()
    assert "can't be kept in" in front.stderr
    assert str(unusable_cache) in front.stderr
    assert "OCTAVO_CACHE_DIR" in front.stderr
    assert "Traceback" not in front.stderr


def test_a_control_with_room_warns_of_nothing(
    start_front: Any, starter_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "room"))
    front = start_front(model=str(starter_path), max_model_len=16).wait_ready()
    assert "can't be kept in" not in front.stderr
    assert list((tmp_path / "room" / "tokenizers").iterdir())


def as_a_mere_user() -> tuple[str, ...]:
    """A command that runs another one without root's right to read everything."""
    if os.geteuid():
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root reads everything, and there is no setpriv to give that up")
    return ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_must_not_be_read_ends_the_start(
    start_front: Any, tmp_path: Path, name: str
) -> None:
    model = write_byte_model(tmp_path / "model")
    (model / name).chmod(0)
    front: FrontUnderTest = start_front(model=model, prefix=as_a_mere_user())
    assert front.process.wait(timeout=60) == 1
    last = front.stderr.splitlines()[-1]
    assert str(model / name) in last
    assert "ermission denied" in last
    assert "Traceback" not in front.stderr


def test_a_control_that_may_be_read_starts(start_front: Any, tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "model")
    start_front(model=model, prefix=as_a_mere_user()).wait_ready()


def test_a_tokenizer_with_more_ids_than_the_model_embeds(start_front: Any) -> None:
    """The byte model's tokenizer has 257, and a space is the 221st."""
    front: FrontUnderTest = start_front(model={"vocab_size": 200}).wait_ready()
    assert "ids up to 256, and the model embeds 0 to 199" in front.stderr
    refused = front.post("/v1/completions", {"prompt": "a b", "max_tokens": 1})
    assert refused.status_code == 400
    assert "integers from 0 to 199" in refused.json()["error"]["message"]
    answer = front.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "ab"


def test_a_control_with_a_tokenizer_that_fits_warns_of_nothing(start_front: Any) -> None:
    assert "the model embeds" not in start_front().wait_ready().stderr
