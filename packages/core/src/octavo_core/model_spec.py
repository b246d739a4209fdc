"""A model's hyper-parameters, read from its ``config.json`` or GGUF metadata.

One frozen struct is enough for the planner, the front process and the worker, so
none of them needs transformers to know a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUFHeader, read_gguf_header

# GGUF's name of an architecture to the class name that config.json uses.
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Hyper-parameters, under the names of transformers' configuration.

    Attributes:
        architecture: Class name, for example ``LlamaForCausalLM``.
        dtype: Type of the checkpoint's weights, or None if it does not say.
        eos_token_ids: Every id that ends an answer.
        rope_parameters: ``rope_type`` and its values; empty means the default kind.
    """

    architecture: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] = {}
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ModelError(
                    f"{name} is {getattr(self, name)}; it must be positive.", field=name
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}.",
                field="num_key_value_heads",
            )

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V that one token takes over all layers."""
        heads_bytes = self.num_key_value_heads * 2 * self.head_dim * dtype_bytes
        return self.num_hidden_layers * heads_bytes


_POSITIVE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def read_model_spec(path: str | Path) -> ModelSpec:
    """Read the spec of a model folder or a .gguf file.

    Raises:
        ModelError: Names the file and the entry that is missing or wrong.
    """
    path = Path(path)
    if path.is_dir():
        return spec_from_config(
            read_json(path / "config.json"), read_json(path / "generation_config.json", {})
        )
    return spec_from_gguf(read_gguf_header(path))


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object from a model folder.

    Args:
        default: What to return if there is no such file; None means it must be there.

    Raises:
        ModelError: The file is missing, unreadable or no JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        if default is not None:
            return default
        raise ModelError(f"{path.parent} has no {path.name}.", field=path.name) from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.", field=path.name) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}.", field=path.name) from error


def spec_from_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Build a spec from the contents of ``config.json`` and ``generation_config.json``.

    Reads the old and the new spelling of keys that transformers renamed
    (``torch_dtype``/``dtype``, ``rope_scaling``/``rope_parameters``).

    Raises:
        ModelError: An entry is missing or has a wrong type.
    """
    generation_config = generation_config or {}
    architectures = config.get("architectures") or [None]
    hidden_size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(hidden_size, int) and isinstance(num_heads, int):
        head_dim = hidden_size // max(num_heads, 1)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope_theta = rope.pop("rope_theta", None) or config.get("rope_theta")
    eos = generation_config.get("eos_token_id", config.get("eos_token_id"))
    fields = {
        "architecture": architectures[0],
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "rope_theta": rope_theta,
        "rope_parameters": {} if rope.get("rope_type") == "default" else rope,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "eos_token_ids": _as_ids(eos),
    }
    for name in (
        "num_hidden_layers",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "bos_token_id",
    ):
        fields[name] = config.get(name)
    if isinstance(fields["bos_token_id"], list):
        fields["bos_token_id"] = fields["bos_token_id"][0] if fields["bos_token_id"] else None
    return _convert(fields, "config.json")


def spec_from_gguf(header: GGUFHeader) -> ModelSpec:
    """Build a spec from GGUF metadata.

    Raises:
        ModelError: The architecture is not supported, or an entry is missing or wrong.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ModelError(
            f"{header.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {known}.",
            field="general.architecture",
        )

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length")
    if head_dim is None and isinstance(num_heads, int) and isinstance(hidden_size, int):
        head_dim = hidden_size // max(num_heads, 1)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{header.path}: there is no tensor token_embd.weight.")
    fields = {
        "architecture": GGUF_ARCHITECTURES[architecture],
        "num_hidden_layers": get("block_count"),
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_parameters": _gguf_rope(header, get),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "sliding_window": get("attention.sliding_window"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _gguf_eos(metadata),
    }
    return _convert(fields, str(header.path))


def _gguf_rope(header: GGUFHeader, get: Any) -> dict[str, Any]:
    kind = get("rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        raise ModelError(
            f"{header.path}: tensor rope_freqs.weight (llama3 rope) is not supported yet.",
            field="rope_freqs.weight",
        )
    if kind == "none":
        return {}
    return {"rope_type": kind, "factor": get("rope.scaling.factor", 1.0)}


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return _as_ids([metadata.get(f"tokenizer.ggml.{key}") for key in keys])


def _as_ids(value: Any) -> tuple[int, ...]:
    """Return ids as a tuple without repeats; accepts None, one id or a list."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if item is not None))


def _convert(fields: Mapping[str, Any], source: str) -> ModelSpec:
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(given, ModelSpec)
    except msgspec.ValidationError as error:
        reason = str(error).rstrip(".")
        raise ModelError(f"{source}: {reason}.", field=source) from error
