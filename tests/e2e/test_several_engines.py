"""Two engines of the starter model behind one front answer as one engine does."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.prompts import PROMPTS
from support.server import Server, running_server

pytestmark = pytest.mark.timeout(300)


def answers(url: str) -> list[str]:
    """Ask all at once; every other one is sampled with a seed."""

    def ask(index: int) -> str:
        body: dict[str, Any] = {"prompt": PROMPTS[index], "max_tokens": 8, "seed": index}
        body["temperature"] = 0.8 * (index % 2)
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text: str = json.load(response)["choices"][0]["text"]
            return text

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(4)))


def test_two_engines_answer_as_one(server: Server, starter_path: Path, tmp_path: Path) -> None:
    alone = answers(server.url)
    assert len(set(alone)) == len(alone)
    arguments = ("--data-parallel-size", "2", "--max-model-len", "512")
    with running_server(str(starter_path), *arguments, log=tmp_path / "log") as several:
        with urllib.request.urlopen(f"{several.url}/health", timeout=30) as response:
            assert len(json.load(response)["engines"]) == 2
        assert answers(several.url) == alone
