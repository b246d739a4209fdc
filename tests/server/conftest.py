from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo_server.starter_model import starter_gguf
from octavo_server.tokenizer import Tokenizer, load_tokenizer
from support.gguf_writer import llama_metadata, write_gguf
from support.spm import SPM_TOKENS


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """The starter model's file, fetched once."""
    return starter_gguf()


@pytest.fixture(scope="session")
def starter_tokenizer(starter_path: Path) -> Tokenizer:
    return load_tokenizer(starter_path)


@pytest.fixture(scope="session")
def spm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a small SentencePiece vocabulary with byte fallback."""
    return write_spm(tmp_path_factory.mktemp("spm") / "spm.gguf")


@pytest.fixture(scope="session")
def spm_tokenizer(spm_path: Path) -> Tokenizer:
    return load_tokenizer(spm_path)


def write_spm(path: Path, **changes: Any) -> Path:
    tokens, scores, types = zip(*SPM_TOKENS, strict=True)
    metadata = llama_metadata(
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": list(tokens),
            "tokenizer.ggml.scores": list(scores),
            "tokenizer.ggml.token_type": list(types),
            "tokenizer.ggml.unknown_token_id": 0,
            **changes,
        }
    )
    return write_gguf(path, {k: v for k, v in metadata.items() if v is not None}, {})


def byte_level_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE without merges: every byte is a token; then two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a model folder: a tokenizer, a tiny config.json, and weights that are empty."""

    def make(**files: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        byte_level_backend().save(str(folder / "tokenizer.json"))
        (folder / "model.safetensors").write_bytes(b"")
        contents = {
            "config": {
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": 1,
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "vocab_size": 1000,
                "max_position_embeddings": 4096,
                "eos_token_id": 999,
            },
            "tokenizer_config": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
            },
            **files,
        }
        for name, content in contents.items():
            if content is None:
                continue
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture
def server_spm() -> Callable[..., Path]:
    """Write a SentencePiece GGUF file with some metadata changed."""
    return write_spm
