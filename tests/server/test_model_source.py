from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from octavo_core.errors import ModelError
from octavo_server.model_source import resolve_model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("the network was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)


def test_starter_model(starter_path: Path) -> None:
    assert resolve_model("") == (starter_path, "SmolLM2-135M-Instruct")


def test_local_models(make_folder: Callable[..., Path], starter_path: Path) -> None:
    folder = make_folder()
    assert resolve_model(str(folder)) == (folder, str(folder))
    assert resolve_model(str(starter_path)).path == starter_path.resolve()


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "model",
    [
        "/no/such/dir",
        "./model",
        "../model",
        "~/no-such-model",
        "a/b/c",
        "model.gguf",
        "x/config.json",
    ],
)
def test_paths_that_do_not_exist(model: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve_model(model)
    assert error.value.message == f"{model} does not exist."


@pytest.mark.usefixtures("no_network")
def test_mistyped_folder_of_a_folder_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="models/llama does not exist"):
        resolve_model("models/llama")


@pytest.mark.parametrize(
    ("remove", "add", "missing"),
    [
        (["config.json"], [], "has no config.json."),
        (["tokenizer.json"], [], "has no tokenizer.json."),
        (["model.safetensors"], [], r"has no weights as \*.safetensors."),
        (["model.safetensors"], ["pytorch_model.bin"], "pickled weights are not loaded"),
        (
            ["config.json", "tokenizer.json", "model.safetensors"],
            ["q4.gguf"],
            r"has no config.json, no tokenizer.json, no weights .* name it: .*q4.gguf",
        ),
    ],
)
def test_folder_says_what_is_missing(
    make_folder: Callable[..., Path], remove: list[str], add: list[str], missing: str
) -> None:
    folder = make_folder()
    for name in remove:
        (folder / name).unlink()
    for name in add:
        (folder / name).touch()
    with pytest.raises(ModelError, match=missing) as error:
        resolve_model(str(folder))
    assert str(folder) in error.value.message
    assert "\n" not in error.value.message


def test_files_that_are_no_models(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_folder()
    with pytest.raises(ModelError, match=r"is a file but not a .gguf file"):
        resolve_model(str(folder / "config.json"))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"m.gguf is no GGUF file: it is empty"):
        resolve_model(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match="does not start with 'GGUF'"):
        resolve_model(str(tmp_path / "m.gguf"))


_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_UNREACHABLE = {"HF_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("model", "environment", "reason"),
    [
        ("user/definitely-missing", _OFFLINE, "HF_HUB_OFFLINE"),
        ("user/missing:file.gguf", _OFFLINE, "HF_HUB_OFFLINE"),
        ("user/definitely-missing", _UNREACHABLE, "the hub can't be reached"),
        ("user/missing:file.gguf", _UNREACHABLE, "the hub can't be reached"),
    ],
)
def test_hub_that_cannot_be_reached(
    tmp_path: Path, model: str, environment: dict[str, str], reason: str
) -> None:
    # The library reads its environment when it is imported.
    code = (
        "import sys\n"
        "from octavo_core.errors import ModelError\n"
        "from octavo_server.model_source import resolve_model\n"
        "try:\n"
        "    resolve_model(sys.argv[1])\n"
        "except ModelError as error:\n"
        "    print(error.message)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, model],
        env={**os.environ, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", **environment},
        capture_output=True,
        text=True,
        timeout=15,
        check=True,
    )
    assert "Retrying" not in result.stderr
    assert result.stdout.startswith(f"Model {model} is neither a local path nor")
    assert reason in result.stdout
    assert result.stdout.count("\n") == 1


def test_hub_model_is_fetched_and_checked(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder()
    asked: list[tuple[str, str | None]] = []

    def download(repo_id: str, revision: str | None, **patterns: object) -> str:
        asked.append((repo_id, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/name", "v1") == (folder, "org/name")
    assert asked == [("org/name", "v1")]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        resolve_model("org/name")


def test_a_hub_model_brings_what_tells_how_it_pools(
    monkeypatch: pytest.MonkeyPatch, make_folder: Callable[..., Path]
) -> None:
    """It lies in a folder of the repository, of which nothing else is fetched."""
    folder = make_folder(modules=[{"type": "sentence_transformers.models.Pooling"}])
    fetched: list[str] = []

    def download(
        repo_id: str, *, allow_patterns: list[str], ignore_patterns: Sequence[str] = (), **_: object
    ) -> str:
        files = ["config.json", "1_Pooling/config.json", "onnx/model.safetensors"]
        wanted = filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=list(ignore_patterns)
        )
        fetched.extend(wanted)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/name").path == folder
    assert fetched == ["config.json", "1_Pooling/config.json"]
