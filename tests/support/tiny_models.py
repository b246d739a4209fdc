"""Model files that are small enough to be made in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from support.gguf_writer import llama_metadata, write_gguf
from support.spm import SPM_TOKENS


def write_spm(path: Path, **changes: Any) -> Path:
    """Write a GGUF file with a small SentencePiece vocabulary with byte fallback.

    Args:
        changes: Metadata to change, or to leave out if None.
    """
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


def write_folder(folder: Path, **files: Any) -> Path:
    """Write a model folder: a tokenizer, a tiny config.json, and weights that are empty.

    Args:
        files: Contents of further JSON files, or of those that it has anyway.
    """
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
