"""A model's hyper-parameters, read from its ``config.json`` or GGUF metadata.

One frozen struct is enough for the planner, the front process and the worker, so
none of them needs transformers to know a model. Any model with the usual keys can be
read and planned; which can be computed is the worker's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUFHeader, read_gguf_header
from octavo_core.gguf_config import fields_from_gguf
from octavo_core.hf_config import fields_from_config
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.kv_cache_layout import group_layers
from octavo_core.layer_spec import LayerKind, LayerSpec
from octavo_core.model_family import MAX_EXPERTS, MAX_LAYERS, ModelFamily, family_of
from octavo_core.quantization import Quantization


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Hyper-parameters, under the names of transformers' configuration.

    Attributes:
        architecture: Class name, for example ``LlamaForCausalLM``.
        num_key_value_heads: The largest of all layers, where they differ.
        head_dim: Numbers of one head of q and k.
        dtype: Type of the checkpoint's weights, or None if it does not say.
        eos_token_ids: Every id that ends an answer.
        rope_parameters: ``rope_type`` and its values; empty means the default kind.
        rope_local_parameters: Those of layers with a window, with a ``rope_theta``; empty means
            that they are like the others.
        sliding_window: Tokens that a layer with a window attends to; None if none has one.
        model_type: Family, for example ``qwen2``.
        head_dim_v: Numbers of one head of v; None means `head_dim`.
        layer_kinds: One for each layer; empty means that all are alike.
        layer_num_kv_heads: One for each layer; empty means `num_key_value_heads`.
        kv_lora_rank: Width of the latent vector of MLA; None means plain K and V.
        num_experts: Experts of a layer of the mixture; 0 means that there is no mixture.
        moe_intermediate_size: Width of one expert.
        shared_expert_intermediate_size: Width of all experts that see every token, together.
        moe_layers: Indices of the layers with experts.
        word_embed_proj_dim: Width of the embedding, if it is projected to `hidden_size`.
        query_pre_attn_scalar: Scores are divided by its root; None means by that of `head_dim`.
        attn_logit_softcapping: Bound of the scores; None for no bound.
        final_logit_softcapping: Bound of the logits; None for no bound.
        norm_topk_prob: The weights of a token's experts are brought to a sum of one.
        routed_scaling_factor: Factor of the weights of experts.
        n_group: Groups of experts, of which a token looks at `topk_group`.
        rope_interleave: With MLA, neighbours are rotated together; otherwise halves.
        do_layer_norm_before: Norms stand before attention and feed-forward, not behind.
        type_vocab_size: Kinds of tokens that an encoder has embeddings for.
        scale_attn_by_inverse_layer_idx: Scores are divided by the layer's number, from 1.
        quantization: How the checkpoint's weights are stored, if not plainly.
        position_offset: Rows of the table of positions before that of the first token.
        max_seq_length: Most tokens of a text by default, as sentence-transformers writes it
            down; None means the whole context.
        stage_kv_cache_groups: Of a stage of a pipeline, the whole model's groups, with this
            stage's layers; empty for a whole model.
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
    model_type: str = ""
    head_dim_v: int | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    layer_num_kv_heads: tuple[int, ...] = ()
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    moe_layers: tuple[int, ...] = ()
    word_embed_proj_dim: int | None = None
    rope_local_parameters: dict[str, Any] = {}
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    topk_method: str | None = None
    do_layer_norm_before: bool = True
    rope_interleave: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    type_vocab_size: int = 0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    quantization: Quantization | None = None
    position_offset: int = 0
    max_seq_length: int | None = None
    stage_kv_cache_groups: tuple[KVCacheGroup, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ModelError(f"{name} is {value}; it must be positive.", field=name)
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value < 0:
                raise ModelError(f"{name} is {value}; it can't be negative.", field=name)
        if self.num_experts > MAX_EXPERTS:
            raise ModelError(
                f"num_experts is {self.num_experts}; at most {MAX_EXPERTS} are taken.",
                field="num_experts",
            )
        if self.num_hidden_layers > MAX_LAYERS:
            raise ModelError(
                f"num_hidden_layers is {self.num_hidden_layers}; at most {MAX_LAYERS} are taken.",
                field="num_hidden_layers",
            )
        for name in ("layer_kinds", "layer_num_kv_heads"):
            given = len(getattr(self, name))
            if given not in (0, self.num_hidden_layers):
                raise ModelError(
                    f"{name} names {given} layers, but there are {self.num_hidden_layers}.",
                    field=name,
                )
        for count in self.layer_num_kv_heads or (self.num_key_value_heads,):
            if count and self.num_attention_heads % count:
                raise ModelError(
                    f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                    f"num_key_value_heads={count}.",
                    field="num_key_value_heads",
                )

    @property
    def family(self) -> ModelFamily:
        """What all models of this family have in common."""
        return family_of(self.model_type)

    @property
    def is_encoder(self) -> bool:
        """Whether every token attends to all others; such a model makes no text."""
        return self.family.is_encoder

    @property
    def context_length(self) -> int:
        """Most tokens that there are positions for."""
        return self.max_position_embeddings - self.position_offset

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps in the KV cache."""
        if self.is_encoder:
            return (LayerSpec("none", 0, 0, 0),) * self.num_hidden_layers
        window = self.sliding_window
        if window is not None and window >= self.max_position_embeddings:
            window = None  # never full
        alike: LayerKind = "full" if window is None else "sliding"
        kinds = self.layer_kinds or (alike,) * self.num_hidden_layers
        heads = self.layer_num_kv_heads or (self.num_key_value_heads,) * self.num_hidden_layers
        return tuple(
            self._layer(kind, count, window) for kind, count in zip(kinds, heads, strict=True)
        )

    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """Group the layers that share a block table; see `octavo_core.kv_cache_layout`."""
        return self.stage_kv_cache_groups or group_layers(self.layers)

    def kv_bytes_per_token(self, dtype_bytes: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of K and V that one token takes over all layers, on one device."""
        numbers = (layer.kv_numbers_per_token(tensor_parallel_size) for layer in self.layers)
        return sum(numbers) * dtype_bytes

    def _layer(self, kind: LayerKind, num_kv_heads: int, window: int | None) -> LayerSpec:
        if kind == "none" or not num_kv_heads:
            return LayerSpec("none", 0, 0, 0)
        if self.kv_lora_rank is not None:
            return LayerSpec("mla", 1, self.kv_lora_rank + self.qk_rope_head_dim, 0)
        if kind == "full" or window is None:
            kind, window = "full", None
        return LayerSpec(
            kind, num_kv_heads, self.head_dim, self.head_dim_v or self.head_dim, window
        )


_POSITIVE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "head_dim_v",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "kv_lora_rank",
    "q_lora_rank",
    "word_embed_proj_dim",
    "query_pre_attn_scalar",
    "n_group",
    "topk_group",
    "max_seq_length",
    "context_length",
)
_NOT_NEGATIVE = (
    "position_offset",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def read_model_spec(path: str | Path) -> ModelSpec:
    """Read the spec of a model folder or a .gguf file.

    Raises:
        ModelError: Names the file and the entry that is missing or wrong.
    """
    path = Path(path)
    if path.is_dir():
        spec = spec_from_config(
            read_json(path / "config.json"), read_json(path / "generation_config.json", {})
        )
        return _with_max_seq_length(spec, path)
    return spec_from_gguf(read_gguf_header(path, with_vocabulary=False))


def _with_max_seq_length(spec: ModelSpec, folder: Path) -> ModelSpec:
    # One name is for all models, but older versions had one for each family.
    names = ("bert", "roberta", "xlm-roberta", "camembert")
    for name in names:
        file = f"sentence_{name}_config.json"
        length = read_json(folder / file, {}).get("max_seq_length")
        if length is None:
            continue
        if type(length) is not int or length < 1:
            raise ModelError(f"{file}: max_seq_length is {length!r}.", field="max_seq_length")
        return msgspec.structs.replace(spec, max_seq_length=length)
    return spec


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}.", field=path.name) from error


def spec_from_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Build a spec from the contents of ``config.json`` and ``generation_config.json``.

    Raises:
        ModelError: An entry is missing or has a wrong type.
    """
    return _convert(lambda: fields_from_config(config, generation_config or {}), "config.json")


def spec_from_gguf(header: GGUFHeader) -> ModelSpec:
    """Build a spec from GGUF metadata.

    Raises:
        ModelError: An entry is missing or wrong.
    """
    return _convert(lambda: fields_from_gguf(header), str(header.path))


def _convert(collect: Callable[[], Mapping[str, Any]], source: str) -> ModelSpec:
    try:
        given = {name: value for name, value in collect().items() if value is not None}
        return msgspec.convert(given, ModelSpec)
    except msgspec.ValidationError as error:
        reason = str(error).rstrip(".")
        raise ModelError(f"{source}: {reason}.", field=source) from error
    except ModelError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        # An entry of another type than what is computed from it expects.
        raise ModelError(f"{source}: an entry has a wrong type ({error}).", field=source) from error
