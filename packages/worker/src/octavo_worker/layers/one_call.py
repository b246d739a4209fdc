"""What of a model's steps can be one call of the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import BatchTables, DecoderStep, PackedWeight
from octavo_kernels.dispatch import reference_forced
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.parallel_weights import group_of
from octavo_worker.layers.weight import Weight


@runtime_checkable
class OneCallModel(Protocol):
    """A model that may run a whole step in one call."""

    def decoder_step(self, tables: BatchTables, kv_caches: Sequence[KVCache]) -> DecoderStep | None:
        """Return its steps over a batch and its caches, or None where it can't.

        Args:
            tables: The persistent batch.
            kv_caches: One for each layer.
        """
        ...


def one_part(weight: Weight) -> PackedWeight | None:
    """Return a packed weight that is one part; None for any other."""
    if isinstance(weight, Tensor) or len(weight) != 1:
        return None
    return weight[0]


def fits_one_call(spec: ModelSpec, weights: Mapping[str, Weight]) -> bool:
    """Whether `octavo_kernels.Decoder` takes a Llama-like model.

    Without it, the layers run one operation after the other: what it does not have are
    windows, soft caps, experts, sorted inputs, biases of the feed-forward, and sizes that do
    not fill its vectors. With ``OCTAVO_KERNELS=reference`` each operation is its torch twin.
    """
    if group_of(weights) is not None:  # between the operations results are exchanged
        return False
    packed = [weight for weight in weights.values() if isinstance(weight, tuple)]
    if reference_forced() or not packed:
        return False
    has_sorted_inputs = any(part.input_order is not None for parts in packed for part in parts)
    rotary_dim = int(spec.head_dim * spec.rope_parameters.get("partial_rotary_factor", 1.0))
    sizes_fit = not (
        spec.head_dim % 16  # halves of rotated heads are vectors of 8
        or rotary_dim % 16
        or spec.hidden_size % 32
        or spec.intermediate_size % 32
        or spec.num_attention_heads * spec.head_dim % 32
    )
    layers_fit = all(
        layer.kind == "full" and layer.num_kv_heads == spec.num_key_value_heads
        for layer in spec.layers
    )
    is_plain = not (
        has_sorted_inputs
        or spec.mlp_bias
        or spec.num_experts
        or spec.attn_logit_softcapping
        or spec.family.attention_sinks
    )
    return sizes_fit and layers_fit and is_plain
