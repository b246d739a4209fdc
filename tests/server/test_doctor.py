"""``octavo doctor``: facts about the machine, and what would keep a server from running well."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo_server.cli.doctor import ENOUGH_DISK, find_problems
from octavo_server.cli.parser import run_command


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run_command(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_facts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = doctor(capsys)
    assert code == (1 if facts["problems"] else 0)
    assert {"octavo", "python", "torch", "numba"} <= set(facts["versions"])
    assert facts["memory_available"] > 1 << 20
    cpu = facts["cpu"]
    assert cpu["kernels_total"] > 20
    assert cpu["kernels_compiled"] == cpu["kernels_total"] - len(cpu["missing"])
    assert set(facts["cache"]) == {"folder", "bytes", "disk_free"}


def test_facts_for_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["doctor"])
    out = capsys.readouterr().out
    assert "torch" in out.splitlines()[0]
    for word in ("CPU", "instructions", "memory", "cache", "disk", "kernels"):
        assert f"\n{word} " in out


def facts(**changes: Any) -> dict[str, Any]:
    cpu = {"is_writable": True, "features": ["avx2"], "kernel_folder": "/cache/kernels"}
    cache = {"folder": "/cache", "disk_free": ENOUGH_DISK}
    return {"cpu": cpu | changes, "cache": cache | changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"features": ["neon"]}, None),
        ({"is_writable": False}, "/cache/kernels can't be written.*OCTAVO_CACHE_DIR"),
        ({"features": ["f16c"]}, "neither AVX2 nor NEON"),
        ({"disk_free": ENOUGH_DISK - 1}, "only 1024.00 MiB of disk are free at /cache"),
    ],
)
def test_problems_say_what_to_do(changes: dict[str, Any], words: str | None) -> None:
    problems = find_problems(facts(**changes))
    assert len(problems) == (0 if words is None else 1)
    if words is not None:
        assert re.search(words, problems[0])


def test_a_cache_that_cannot_be_made_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo_kernels.cpu import jit

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    jit.cache_folder.cache_clear()
    try:
        code, found = doctor(capsys)
    finally:
        monkeypatch.undo()
        jit.cache_folder.cache_clear()
    assert code == 1
    assert "can't be written" in found["problems"][0]
