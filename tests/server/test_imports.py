"""What importing costs: the front process must not load torch, and the command must be quick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import octavo_server


def modules_after(code: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(result.stdout.split())


def test_the_package_alone_imports_nothing_heavy() -> None:
    loaded = modules_after("import octavo_server; octavo_server.__version__")
    assert loaded.isdisjoint(
        {"tokenizers", "jinja2", "msgspec", "fastapi", "zmq", "torch", "octavo_core.config"}
    )


def test_the_front_never_imports_torch_or_transformers(starter_path: Path) -> None:
    loaded = modules_after(
        "from octavo_core.model_spec import read_model_spec\n"
        "from octavo_core.sampling_params import SamplingParams\n"
        "from octavo_server.input_processor import InputProcessor\n"
        "from octavo_server.output_processor import OutputProcessor\n"
        "from octavo_server.model_source import resolve_model\n"
        "from octavo_server.tokenizer import load_tokenizer\n"
        "path = resolve_model('').path\n"
        "tokenizer = load_tokenizer(path)\n"
        "processor = InputProcessor(tokenizer, read_model_spec(path), 8192)\n"
        "messages = [{'role': 'user', 'content': 'hi'}]\n"
        "requests = processor.process_chat('r', messages, SamplingParams())\n"
        "OutputProcessor(tokenizer).add(requests[0], 'r', 0)\n"
    )
    assert loaded.isdisjoint({"torch", "transformers", "numpy", "huggingface_hub", "octavo_worker"})


def test_importing_llm_does_not_import_torch() -> None:
    assert "torch" not in modules_after("from octavo_server import LLM, SamplingParams")


def test_public_names() -> None:
    assert set(octavo_server.__all__) <= set(dir(octavo_server))
    for name in octavo_server.__all__:
        assert getattr(octavo_server, name).__name__ == name
    assert len(dir(octavo_server)) == len(set(dir(octavo_server)))
    assert not hasattr(octavo_server, "nothing")
