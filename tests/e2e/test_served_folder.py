"""A folder with safetensors is served, and answers as transformers does."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from support.server import Server, running_server

VOCAB_SIZE = 260


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose tokens are the bytes."""
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tiny_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("tiny-server") / "log"
    with running_server(str(folder), "--served-model-name", "tiny", log=log) as server:
        yield server


def test_folder(folder: Path, tiny_server: Server) -> None:
    body = {
        "model": "tiny",
        "prompt": "hello there",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{tiny_server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        choice = json.load(response)["choices"][0]
    prompt_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello there").ids
    assert choice["prompt_token_ids"] == prompt_ids
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    expected = reference.generate(
        torch.tensor([prompt_ids]), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    assert choice["token_ids"] == expected[0, len(prompt_ids) :].tolist()


def test_chat_without_a_template_is_refused(tiny_server: Server) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(
        f"{tiny_server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    error = json.load(refused.value)["error"]
    assert refused.value.code == 400
    assert "chat template" in error["message"]
