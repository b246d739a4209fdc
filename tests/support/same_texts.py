"""The texts of one tiny model, served in a given way."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.prompts import PROMPTS
from support.server import Server, running_server
from support.tiny_families import save_family
from support.tiny_models import byte_level_backend

NUM_TEXTS = 8

# Prompts are computed in pieces, and those that start alike share blocks.
_FLAGS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--kv-cache-memory", "64MiB")


def save_model(folder: Path) -> Path:
    """Save a random Llama whose tokens are bytes, with sizes that two workers can divide."""
    save_family("llama", folder, vocab_size=258, max_position_embeddings=1024)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder


def ask(url: str) -> list[str]:
    """Ask all at once; every other text is greedy, and the others are sampled with a seed."""

    def one(index: int) -> str:
        body: dict[str, Any] = {"prompt": PROMPTS[-1 - index], "max_tokens": 24, "seed": index}
        body |= {"temperature": 0.8 * (index % 2), "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text: str = json.load(response)["choices"][0]["text"]
            return text

    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        return list(pool.map(one, range(NUM_TEXTS)))


def running(folder: Path, log: Path, *flags: str) -> Any:
    """Serve the model, as a context."""
    return running_server(str(folder), "--device", "cpu", *_FLAGS, *flags, log=log)


def texts(folder: Path, log: Path, *flags: str) -> list[str]:
    """Serve the model, and return what it says."""
    server: Server
    with running(folder, log, *flags) as server:
        return ask(server.url)
