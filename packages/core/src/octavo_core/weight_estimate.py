"""How many bytes a model's weights take: counted from its shapes, or read off a GGUF file."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from octavo_core.gguf import GGUFHeader
from octavo_core.model_spec import ModelSpec
from octavo_core.quantization import Quantization


class ParameterCount(NamedTuple):
    """Parameters of one part of a model.

    Attributes:
        linear: Weights of linear layers, which quantization packs.
        experts: The same, of a mixture's experts.
        other: Norms, biases and routers, which nothing packs.
    """

    linear: int = 0
    experts: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.experts + self.other

    def num_bytes(self, dtype_bytes: int, quantization: Quantization | None) -> int:
        """Bytes with linear layers in `quantization`, and the rest in the plain type."""
        packed: float = dtype_bytes
        if quantization is not None and quantization.weight_bytes is not None:
            packed = quantization.weight_bytes
        only_experts = quantization is not None and quantization.only_experts
        linear = self.linear * (dtype_bytes if only_experts else packed)
        return int(linear + self.experts * packed + self.other * dtype_bytes)


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a model's parts on one device.

    Attributes:
        num_parameters: Of the whole model, over all devices.
        layer_bytes: One entry for each layer.
        embedding_bytes: The embedding; the first stage has it.
        head_bytes: Final norm and language-model head; the last stage has them. Without the
            head if it is tied to the embedding.
        tied_bytes: What a last stage that is not the first has to hold a second time.
        source: ``estimated`` from shapes, or ``file``.
    """

    num_parameters: int
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    tied_bytes: int
    source: str

    def stage_bytes(self, stage: range) -> int:
        """Bytes of one pipeline stage, which holds these layers."""
        is_first, is_last = stage.start == 0, stage.stop == len(self.layer_bytes)
        count = sum(self.layer_bytes[index] for index in stage)
        if is_first:
            count += self.embedding_bytes
        if is_last:
            count += self.head_bytes + (0 if is_first else self.tied_bytes)
        return count


def estimate_weights(
    spec: ModelSpec,
    dtype_bytes: int,
    quantization: Quantization | None = None,
    tensor_parallel_size: int = 1,
) -> Weights:
    """Count parameters from shapes, and what they take on one device.

    Args:
        spec: Hyper-parameters.
        dtype_bytes: Bytes of what is not quantized.
        quantization: How linear layers are stored; None means plainly.
        tensor_parallel_size: Devices that share each layer. Norms, routers and biases are
            on all of them, and K and V projections on those that share a head.
    """
    tp = tensor_parallel_size
    on_embedding = quantization if quantization is not None and quantization.embeddings else None

    def table(count: int) -> int:
        return ParameterCount(linear=-(-count // tp)).num_bytes(dtype_bytes, on_embedding)

    outer = _outer_parameters(spec)
    head_count = 0 if spec.tie_word_embeddings else outer.table
    return Weights(
        num_parameters=sum(
            layer_parameters(spec, index).total for index in range(spec.num_hidden_layers)
        )
        + outer.table
        + outer.positions
        + outer.final
        + head_count,
        layer_bytes=tuple(
            layer_parameters(spec, index, tp).num_bytes(dtype_bytes, quantization)
            for index in range(spec.num_hidden_layers)
        ),
        embedding_bytes=table(outer.table) + outer.positions * dtype_bytes,
        head_bytes=outer.final * dtype_bytes + (table(head_count) if head_count else 0),
        tied_bytes=table(outer.table) if spec.tie_word_embeddings else 0,
        source="estimated",
    )


def weights_of_gguf(header: GGUFHeader, num_layers: int, tensor_parallel_size: int = 1) -> Weights:
    """Add up the tensors of a GGUF file as they are packed there.

    Args:
        header: Of the file.
        num_layers: Of the model.
        tensor_parallel_size: Devices that share each matrix; vectors are on all of them.
    """
    layers = [0] * num_layers
    outer = {"token_embd": 0, "output": 0}
    num_parameters = 0
    for name, tensor in header.tensors.items():
        count = 1
        for dimension in tensor.shape:
            count *= dimension
        num_parameters += count
        split = tensor_parallel_size if len(tensor.shape) > 1 else 1
        num_bytes = -(-tensor.num_bytes // split)
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer is not None and int(layer[1]) < num_layers:
            layers[int(layer[1])] += num_bytes
        else:
            outer["output" if name.startswith("output") else "token_embd"] += num_bytes
    return Weights(
        num_parameters=num_parameters,
        layer_bytes=tuple(layers),
        embedding_bytes=outer["token_embd"],
        head_bytes=outer["output"],
        tied_bytes=0 if "output.weight" in header.tensors else outer["token_embd"],
        source="file",
    )


def main_type(header: GGUFHeader) -> str:
    """Name the tensor type that takes most of a GGUF file."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
    return max(sizes, key=lambda name: sizes[name])


def layer_parameters(spec: ModelSpec, index: int, tensor_parallel_size: int = 1) -> ParameterCount:
    """Count the parameters of one layer on one device."""
    tp = tensor_parallel_size
    attention = _attention(spec, index, tp)
    feed_forward = _experts(spec, tp) if index in spec.moe_layers else _dense(spec, tp)
    norm = spec.hidden_size * (2 if spec.family.layer_norm else 1)
    return ParameterCount(
        attention.linear + feed_forward.linear,
        feed_forward.experts,
        attention.other + feed_forward.other + norm * spec.family.norms_per_layer,
    )


def _attention(spec: ModelSpec, index: int, tp: int) -> ParameterCount:
    if spec.kv_lora_rank is not None:
        return _latent_attention(spec, tp)
    family, width = spec.family, spec.hidden_size
    heads = -(-spec.num_attention_heads // tp)
    by_layer = spec.layer_num_kv_heads
    kv_heads = -(-(by_layer[index] if by_layer else spec.num_key_value_heads) // tp)
    value_dim = spec.head_dim_v or spec.head_dim
    qkv = (heads + kv_heads) * spec.head_dim + kv_heads * value_dim
    other = 0
    if spec.attention_bias or family.qkv_bias or family.all_bias:
        other += qkv
    if spec.attention_bias or family.all_bias:
        other += width
    if family.qk_norm:
        other += 2 * spec.head_dim
    if family.attention_sinks:
        other += heads
    return ParameterCount(linear=width * qkv + heads * value_dim * width, other=other)


def _latent_attention(spec: ModelSpec, tp: int) -> ParameterCount:
    """Count MLA: queries and the latent vector are each projected down, normed, and up."""
    assert spec.kv_lora_rank is not None
    width, rank, heads = spec.hidden_size, spec.kv_lora_rank, -(-spec.num_attention_heads // tp)
    query_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    value_dim = spec.head_dim_v or spec.qk_nope_head_dim
    if spec.q_lora_rank is None:
        query, norms = width * heads * query_dim, rank
    else:
        query = spec.q_lora_rank * (width + heads * query_dim)
        norms = rank + spec.q_lora_rank
    down = width * (rank + spec.qk_rope_head_dim)
    up = rank * heads * (spec.qk_nope_head_dim + value_dim)
    return ParameterCount(linear=query + down + up + heads * value_dim * width, other=norms)


def _dense(spec: ModelSpec, tp: int) -> ParameterCount:
    width, inner = spec.hidden_size, -(-spec.intermediate_size // tp)
    inputs = 2 if spec.family.gated_mlp else 1
    has_bias = spec.mlp_bias or spec.family.all_bias
    bias = inputs * inner + width if has_bias else 0
    return ParameterCount(linear=(inputs + 1) * inner * width, other=bias)


def _experts(spec: ModelSpec, tp: int) -> ParameterCount:
    """Count a mixture; each device has a slice of every expert."""
    width, inner = spec.hidden_size, -(-spec.moe_intermediate_size // tp)
    router = width * spec.num_experts
    if spec.family.attention_sinks:  # gpt-oss, whose experts and router have biases
        router += spec.num_experts * (1 + 2 * inner + width)
    shared = 3 * -(-spec.shared_expert_intermediate_size // tp) * width
    if spec.model_type == "qwen2_moe" and shared:
        router += width  # the shared expert's gate
    return ParameterCount(linear=shared, experts=3 * spec.num_experts * inner * width, other=router)


class _Outer(NamedTuple):
    """Parameters outside of the layers: embedding, learned positions, final norm."""

    table: int
    positions: int
    final: int


def _outer_parameters(spec: ModelSpec) -> _Outer:
    family, narrow = spec.family, spec.word_embed_proj_dim
    positions = final = 0
    if family.learned_positions:
        rows = spec.max_position_embeddings + family.learned_positions - 1
        positions = rows * spec.hidden_size
    if narrow is not None and narrow != spec.hidden_size:
        final = 2 * narrow * spec.hidden_size  # OPT-350m: in and out, and no final norm
    else:
        final = spec.hidden_size * (2 if family.layer_norm else 1)
    return _Outer(spec.vocab_size * (narrow or spec.hidden_size), positions, final)
