"""Writes small GGUF files, good and bad ones, with the standard library alone."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

ALIGNMENT = 32


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type id and value; ints are u32, floats f32."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_value(item) for item in value]
    item_type = items[0][:4] if items else struct.pack("<I", 4)
    return (
        struct.pack("<I", 9)
        + item_type
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]],
    version: int = 3,
) -> Path:
    """Write a file.

    Args:
        tensors: Name to shape (outermost first), type id and data.
    """
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    data = b""
    for name, (shape, type_id, content) in tensors.items():
        header += _string(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", type_id, len(data))
        data += content + b"\0" * (-len(content) % ALIGNMENT)
    path.write_bytes(header + b"\0" * (-len(header) % ALIGNMENT) + data)
    return path


def llama_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a tiny Llama."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**metadata, **changes}
