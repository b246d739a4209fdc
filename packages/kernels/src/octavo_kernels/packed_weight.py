"""The weight of a linear projection in the form that the matmul kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_OF_GROUP = 8
ROWS_OF_PANEL = 16


@dataclass(frozen=True)
class WeightKind:
    """How the numbers of a weight are kept.

    Attributes:
        block: Inputs that share a scale or a set of them; ``in_features`` is a multiple.
        block_bytes: Bytes of a block of one row.
        rows: Rows that are interleaved.
    """

    block: int
    block_bytes: int
    rows: int = ROWS_OF_GROUP


WEIGHT_KINDS = {
    "q8_0": WeightKind(32, 34),
    "q4_0": WeightKind(32, 18),
    "q4_1": WeightKind(32, 20),
    "q4_k": WeightKind(256, 144),
    "q5_k": WeightKind(256, 176),
    "q6_k": WeightKind(256, 210),
    "u4z": WeightKind(32, 20),
    "w8a8": WeightKind(32, 32),
    "f32": WeightKind(1, 4, ROWS_OF_PANEL),
    "bf16": WeightKind(1, 2, ROWS_OF_PANEL),
    "f16": WeightKind(1, 2, ROWS_OF_PANEL),
    "e4m3": WeightKind(1, 1, ROWS_OF_PANEL),
}
"""By name: the GGUF types; ``u4z`` for GPTQ and AWQ (a scale and a zero point for 32 inputs);
``w8a8`` (int8, a scale for each row); and the dense ones, of which ``e4m3`` has scales too."""

DENSE_KINDS = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
"""torch's types of the kinds that are multiplied as float32."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight ``[out_features, in_features]``, repacked without loss and without growth.

    Groups of 8 rows are interleaved (16 for dense kinds), so that a vector of the kernel
    holds one number of each row; the last group is filled up with zeros. A group's bytes
    are, block by block, in the order of these lists; ``[8]`` stands for one of each row,
    and *nibbles* for 128 bytes: ``[4, 8, 4]``, where byte ``[i, row, j]`` has input
    ``4 i + j`` in its low half and ``4 i + j + 16`` in its high half.

    - ``q4_0``: scale float16 [8], nibbles. The weight is ``scale * (q - 8)``.
    - ``q4_1``: scale float16 [8], minimum float16 [8], nibbles. ``scale * q + minimum``.
    - ``u4z``: scale float16 [8], zero float16 [8], nibbles. ``scale * (q - zero)``.
    - ``q8_0``: scale float16 [8], int8 ``[8, 8, 4]``: inputs ``4 i + j`` at ``[i, row, j]``.
    - ``w8a8``: int8 ``[8, 8, 4]``; `scales` has one for each row.
    - ``q4_k`` (of 256): d float16 [8], dmin float16 [8]; the low halves of the eight
      scales (low) and minimums (high), ``[8, 8]``; their upper two bits, two sub-blocks a
      byte, ``[4, 8]``; eight times nibbles. ``d * scale * q - dmin * minimum``.
    - ``q5_k``: the same, and after each nibbles the fifth bits, ``[8, 4]``: bit ``i`` of
      ``[row, j]`` belongs to input ``4 i + j``.
    - ``q6_k``: d float16 [8], sixteen int8 scales ``[16, 8]``; eight times nibbles and the
      upper pairs of bits, ``[2, 8, 4]``: pair ``i`` of ``[h, row, j]`` belongs to input
      ``16 h + 4 i + j``. ``d * scale * (q - 32)``.
    - dense: ``[in_features, 16]``.

    Attributes:
        kind: One of `WEIGHT_KINDS`.
        shape: ``(out_features, in_features)``.
        data: ``[num_groups, bytes of a group]`` uint8, contiguous.
        scales: ``w8a8``: ``[num_groups * 8]`` float32; ``e4m3``: ``[num_groups,
            in_features / scale_block, 16]`` float32; else None.
        scale_block: Inputs that one of `scales` is for; 0 for all.
        input_order: ``[in_features]`` int64, the input that each column belongs to, where
            columns were sorted (GPTQ's act-order); None for their own order.
    """

    kind: str
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor | None = None
    scale_block: int = 0
    input_order: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, scales included."""
        parts = (self.data, self.scales, self.input_order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Project ``[num_tokens, in_features]`` to ``[num_tokens, out_features]``."""
        from octavo_kernels.quantized_matmul import quantized_matmul

        return quantized_matmul(x, self, bias)


def check_shape(kind: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return a weight's shape, if it is one that `kind` can have.

    Raises:
        ValueError: The kind is unknown, or the shape isn't two numbers of which the second
            fills whole blocks.
    """
    if kind not in WEIGHT_KINDS:
        raise ValueError(
            f"weight kind {kind!r} is not supported; supported: {', '.join(WEIGHT_KINDS)}"
        )
    block = WEIGHT_KINDS[kind].block
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"a weight has the shape [out_features, in_features], not {list(shape)}")
    if shape[1] % block:
        raise ValueError(f"in_features is {shape[1]}; for {kind} it must be a multiple of {block}")
    return shape[0], shape[1]


def concatenate_weights(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Join weights of one input into one, the rows of the first coming first.

    Raises:
        ValueError: They differ in kind, in ``in_features`` or in the order of inputs, or
            one but the last does not fill its groups of rows.
    """
    first = weights[0]
    rows = WEIGHT_KINDS[first.kind].rows
    for weight in weights:
        same = (weight.kind, weight.shape[1], weight.scale_block)
        if same != (first.kind, first.shape[1], first.scale_block):
            raise ValueError(
                f"weights of {first.kind} {first.shape} and {weight.kind} {weight.shape} "
                "can't be joined: kind and in_features must be the same"
            )
        if (weight.input_order is None) != (first.input_order is None) or (
            weight.input_order is not None
            and first.input_order is not None
            and not torch.equal(weight.input_order, first.input_order)
        ):
            raise ValueError("weights with different orders of inputs can't be joined")
    for weight in weights[:-1]:
        if weight.shape[0] % rows:
            raise ValueError(
                f"out_features is {weight.shape[0]}; to be joined it must be a multiple of {rows}"
            )
    scales = [weight.scales for weight in weights if weight.scales is not None]
    return PackedWeight(
        kind=first.kind,
        shape=(sum(weight.shape[0] for weight in weights), first.shape[1]),
        data=torch.cat([weight.data for weight in weights]),
        scales=torch.cat(scales) if scales else None,
        scale_block=first.scale_block,
        input_order=first.input_order,
    )
