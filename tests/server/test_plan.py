"""``octavo plan``: the planner of core, with models of the hub and the starter model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo_core.errors import ModelError
from octavo_server.cli.parser import run_command
from octavo_server.model_source import resolve_plan_source
from support.model_configs import LLAMA_3_8B


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """A hub with one model; returns what is asked of it."""
    asked: list[tuple[str, str, Any]] = []
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))

    def download(repo_id: str, file: str, revision: str | None, **options: Any) -> str:
        asked.append((repo_id, file, revision))
        if repo_id != "org/model":
            raise LocalEntryNotFoundError("it is not there")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = run_command(["plan", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_of_a_hub_model_the_configuration_alone_is_fetched(
    hub: list[tuple[str, str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device-memory", "80GiB", "--non-kv-memory", "17GiB", "--revision", "v2"]
    code, content = plan(capsys, "org/model", *flags)
    assert code == 0
    assert hub == [("org/model", "config.json", "v2")]
    assert (content["model"], content["num_gpu_blocks"]) == ("org/model", 28979)
    assert f"{content['max_concurrency']:.2f}" == "56.60"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/other", "neither a local path nor to be had from the hub"),
        ("org/model:file.gguf", "a GGUF file is planned from the disk"),
        ("./missing", r"\./missing does not exist"),
        ("missing.json", "missing.json does not exist"),
    ],
)
def test_what_cannot_be_found_is_a_mistake_and_not_a_misfit(
    hub: list[tuple[str, str, Any]],
    capsys: pytest.CaptureFixture[str],
    model: str,
    words: str,
) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_plan_source(model)
    assert run_command(["plan", model, "--device", "l4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_a_folder_needs_its_configuration_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    for model in (tmp_path, tmp_path / "config.json"):
        assert plan(capsys, str(model), "--device", "h100-80g")[0] == 0
        assert plan(capsys, str(model), "--device", "t4")[0] == 1


def test_the_starter_model(starter_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = plan(capsys, "--device", "l4")
    assert code == 0
    assert content["model"] == "SmolLM2-135M-Instruct"
    assert content["num_parameters"] == 134515008
    assert content["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert content["weights_source"] == "file"
    assert content["weights_bytes"] < starter_path.stat().st_size < 1.1 * content["weights_bytes"]


def test_flags_are_explained_and_mistakes_are_one_line(make_folder: Callable[..., Path]) -> None:
    def octavo(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "octavo_server", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    text = octavo("plan", "--help").stdout
    assert "--non-kv-memory" in text
    assert "h200-141g" in text
    done = octavo("plan", str(make_folder()), "--device", "h101")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "did you mean" in line
