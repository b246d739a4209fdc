"""What of a model's steps can be one call of the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import BatchTables, Decoder, DecoderLayer, DecoderStep, fits_step
from octavo_kernels.dispatch import reference_forced
from octavo_worker.layers.attention import Attention
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.mlp import GatedMLP
from octavo_worker.layers.norm import RMSNorm
from octavo_worker.layers.parallel_weights import group_of
from octavo_worker.layers.weight import Weight


@runtime_checkable
class OneCallModel(Protocol):
    """A model that may run a whole step in one call."""

    def decoder_step(
        self, tables: BatchTables, kv_caches: Sequence[KVCache], group_of_layer: Sequence[int]
    ) -> DecoderStep | None:
        """Return its steps over a batch and its caches, or None where it can't.

        Args:
            tables: The persistent batch.
            kv_caches: One for each layer.
            group_of_layer: Which of the batch's block tables each layer has.
        """
        ...


def packed_layer(
    attention: Attention,
    mlp: GatedMLP,
    input_norm: RMSNorm,
    ffn_norm: RMSNorm,
    after_attention_norm: RMSNorm | None = None,
    after_ffn_norm: RMSNorm | None = None,
) -> DecoderLayer:
    """Put a layer's weights in the terms of `octavo_kernels.Decoder`."""
    assert attention.rotary is not None

    def weight_of(norm: RMSNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight

    return DecoderLayer(
        input_norm=input_norm.weight,
        qkv=attention.qkv_proj.parts,
        qkv_bias=attention.qkv_proj.part_biases,
        query_norm=weight_of(attention.query_norm),
        key_norm=weight_of(attention.key_norm),
        output=attention.o_proj.whole,
        output_bias=attention.o_proj.bias,
        after_attention_norm=weight_of(after_attention_norm),
        ffn_norm=ffn_norm.weight,
        gate_up=mlp.gate_up_proj.parts,
        gate_up_bias=mlp.gate_up_proj.part_biases,
        down=mlp.down_proj.whole,
        down_bias=mlp.down_proj.bias,
        after_ffn_norm=weight_of(after_ffn_norm),
        window=attention.kind.window,
        sinks=attention.sinks,
        cos_sin_cache=attention.rotary.cos_sin_cache,
    )


def join_layers(
    spec: ModelSpec, layers: Sequence[DecoderLayer], norm: RMSNorm, activation: str
) -> Decoder:
    """Make one call of a model's layers and its final norm.

    Args:
        spec: Hyper-parameters.
        layers: Of `packed_layer`.
        norm: The final one.
        activation: Of the feed-forward, as `octavo_kernels.Decoder` names it.
    """
    first = layers[0].cos_sin_cache
    assert first is not None
    return Decoder(
        layers,
        norm.weight,
        spec.num_attention_heads,
        spec.num_key_value_heads,
        spec.head_dim,
        spec.rms_norm_eps,
        first,
        activation,
        spec.attn_logit_softcapping,
    )


def whole_steps(
    decoder: Decoder,
    embedding: Weight,
    head: Weight,
    tables: BatchTables,
    kv_caches: Sequence[KVCache],
    scale: float,
    **options: Any,
) -> DecoderStep | None:
    """Put embedding and head around the layers, where these are packed, and as one part each.

    The other arguments are those of `octavo_kernels.DecoderStep`.
    """
    if isinstance(embedding, Tensor) or isinstance(head, Tensor):
        return None
    if len(embedding) > 1 or len(head) > 1 or not fits_step(embedding[0], head[0]):
        return None
    return DecoderStep(decoder, embedding[0], head[0], tables, kv_caches, scale, **options)


def fits_one_call(spec: ModelSpec, weights: Mapping[str, Weight]) -> bool:
    """Whether `octavo_kernels.Decoder` takes a Llama-like model.

    Without it, the layers run one operation after the other: what it does not have are
    experts, latent attention, sorted inputs, caches of 8 bits, and sizes that do not fill its
    vectors. With ``OCTAVO_KERNELS=reference`` each operation is its torch twin.
    """
    if group_of(weights) is not None:  # between the operations results are exchanged
        return False
    packed = [weight for weight in weights.values() if isinstance(weight, tuple)]
    if reference_forced() or not packed:
        return False
    has_sorted_inputs = any(part.input_order is not None for parts in packed for part in parts)
    rotary_dims = {
        int(spec.head_dim * rope.get("partial_rotary_factor", 1.0))
        for rope in (spec.rope_parameters, spec.rope_local_parameters or spec.rope_parameters)
    }
    sizes_fit = len(rotary_dims) == 1 and not (
        spec.head_dim % 16  # halves of rotated heads are vectors of 8
        or rotary_dims.pop() % 16
        or spec.hidden_size % 32
        or spec.intermediate_size % 32
        or spec.num_attention_heads * spec.head_dim % 32
    )
    layers_fit = all(
        layer.kind in ("full", "sliding") and layer.num_kv_heads == spec.num_key_value_heads
        for layer in spec.layers
    )
    return sizes_fit and layers_fit and not (has_sorted_inputs or spec.num_experts)
