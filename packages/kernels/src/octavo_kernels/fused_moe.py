"""Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538) with gated feed-forwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads
from octavo_kernels.dispatch import use_cpu
from octavo_kernels.gelu_and_mul import gelu_and_mul_reference
from octavo_kernels.multiply import ARGUMENT_BYTES, MULTIPLY, quantized_bytes
from octavo_kernels.packed_weight import DENSE_KINDS, PackedWeight
from octavo_kernels.quantized_matmul import quantized_matmul_reference
from octavo_kernels.silu_and_mul import silu_and_mul_reference

_fused_moe = Kernel("moe.fused_moe", "q")
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class Experts:
    """The weights of all experts of one layer, packed; see `stacked_moe` for others.

    Args:
        gate_up: ``[2 * intermediate_size, hidden_size]`` of each expert, gate first.
        down: ``[hidden_size, intermediate_size]`` of each expert.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.

    Raises:
        ValueError: Shapes don't fit each other, a size is no multiple of 32, a weight has
            sorted inputs, or the activation is another.
    """

    def __init__(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        activation: str = "silu",
    ) -> None:
        self.gate_up, self.down, self.activation = list(gate_up), list(down), activation
        self.hidden_size, self.ffn_size = down[0].shape
        self._check()
        self._gate_up_words = torch.tensor([_projection_words(weight) for weight in gate_up])
        self._down_words = torch.tensor([_projection_words(weight) for weight in down])

    @property
    def word_addresses(self) -> tuple[int, int]:
        """Where the kernel finds what the weights are."""
        return self._gate_up_words.data_ptr(), self._down_words.data_ptr()

    def _check(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation is {self.activation!r}; it must be one of {', '.join(_ACTIVATIONS)}"
            )
        shapes = [
            (weight.shape, (2 * self.ffn_size, self.hidden_size)) for weight in self.gate_up
        ] + [(weight.shape, (self.hidden_size, self.ffn_size)) for weight in self.down]
        if len(self.gate_up) != len(self.down):
            raise ValueError(f"{len(self.gate_up)} gate_up weights, but {len(self.down)} down")
        for found, expected in shapes:
            if found != expected:
                raise ValueError(f"an expert's weight has the shape {found}, not {expected}")
        if self.hidden_size % 32 or self.ffn_size % 32:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and intermediate_size {self.ffn_size}; "
                "both must be multiples of 32"
            )
        if any(weight.input_order is not None for weight in (*self.gate_up, *self.down)):
            raise ValueError("weights with sorted inputs are not supported for experts")


def fused_moe(x: Tensor, experts: Experts, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Send each token through its experts, and add up what they say.

    Args:
        x: ``[num_tokens, hidden_size]``.
        experts: The weights.
        topk_weights: ``[num_tokens, top_k]`` float32, see `select_experts`.
        topk_ids: ``[num_tokens, top_k]`` int32, experts of each token.

    Returns:
        ``[num_tokens, hidden_size]``, of the type of `x`. On a CPU, a token's result is the
        same bit for bit whatever the other tokens.
    """
    if not use_cpu(x, experts.gate_up[0].data):
        return fused_moe_reference(x, experts, topk_weights, topk_ids)
    num_tokens, top_k = topk_ids.shape
    hidden, ffn = experts.hidden_size, experts.ffn_size
    if num_tokens == 0:
        return torch.empty_like(x)
    rows = x.float().contiguous()
    weights = topk_weights.float().contiguous()
    ids = topk_ids.flatten().long()
    order = ids.argsort(stable=True)  # pairs by expert, tokens in their order
    token_of_pair = (order // top_k).int()
    place_of_choice = torch.empty_like(order)
    place_of_choice[order] = torch.arange(len(order))
    place_of_choice = place_of_choice.int()
    starts = torch.zeros(len(experts.down) + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(ids, minlength=len(experts.down)).cumsum(0)
    pairs = len(order)
    floats = torch.empty(pairs * (2 * hidden + 3 * ffn))
    row_bytes = quantized_bytes(hidden), quantized_bytes(ffn)
    bytes_ = torch.empty(pairs * sum(row_bytes), dtype=torch.uint8)
    arguments = torch.empty(get_num_threads() * ARGUMENT_BYTES, dtype=torch.uint8)
    out = torch.empty(num_tokens, hidden)
    at = floats.data_ptr()
    words = torch.tensor(
        [
            *(rows.data_ptr(), 4 * hidden, num_tokens, top_k, hidden, ffn),
            *(_ACTIVATIONS[experts.activation], len(experts.down), *experts.word_addresses),
            *(weights.data_ptr(), token_of_pair.data_ptr(), place_of_choice.data_ptr()),
            *(starts.data_ptr(), at, bytes_.data_ptr(), at + 4 * pairs * hidden),
            *(at + 4 * pairs * (hidden + 2 * ffn), bytes_.data_ptr() + pairs * row_bytes[0]),
            *(at + 4 * pairs * (hidden + 3 * ffn), out.data_ptr(), arguments.data_ptr()),
        ]
    )
    _fused_moe(words.data_ptr())
    return out.to(x.dtype)


def fused_moe_reference(
    x: Tensor, experts: Experts, topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    """The torch twin of `fused_moe`."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        hidden = quantized_matmul_reference(x[tokens].float(), gate_up)
        if experts.activation == "silu":
            hidden = silu_and_mul_reference(hidden)
        else:
            approximate = "tanh" if experts.activation == "gelu_tanh" else "none"
            hidden = gelu_and_mul_reference(hidden, approximate)
        result = quantized_matmul_reference(hidden, down)
        out.index_add_(0, tokens, result * topk_weights[tokens, choices].float().unsqueeze(1))
    return out.to(x.dtype)


def _projection_words(weight: PackedWeight) -> list[int]:
    scales = 0 if weight.scales is None else weight.scales.data_ptr()
    return [
        *(MULTIPLY[weight.kind].address, int(weight.kind not in DENSE_KINDS), *weight.shape),
        *(weight.data.data_ptr(), 0, scales, weight.scale_block),
    ]
