"""Quantized weights as the Triton kernels take them.

GGUF's types, GPTQ, AWQ and float8 all say the same: a weight is ``(code - zero) * scale +
minimum``, where neighbours share scale, zero and minimum. One layout for all of them makes one
kernel for all of them. Codes, scales and minima lie in arrays of their own, and each row of the
output in one run, so that loads are aligned and wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.interleave import separate
from octavo_kernels.packed_weight import PackedWeight
from octavo_kernels.weight_fields import WeightFields

GROUPED_KINDS = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "u4z", "e4m3")
"""Kinds of `octavo_kernels.packed_weight.WEIGHT_KINDS` that `group_weight` takes."""


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A matrix of ``[out_features, in_features]``.

    Attributes:
        codes: ``[out_features, in_features / 2]`` uint8, input ``2 j`` in the low half of byte
            ``j``; or ``[out_features, in_features]`` int8 or float8_e4m3fn.
        scales: ``[out_features, in_features / group_size]`` float16 or float32.
        zeros: Like `scales`, uint8, subtracted from the codes; None for `zero`.
        minima: Like `scales`, added to the scaled codes; None for 0.
        group_size: Inputs that share a scale.
        zero: Subtracted from all codes where there are no `zeros`.
        input_order: ``[in_features]`` int64, the input of each column, or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    minima: Tensor | None
    group_size: int
    zero: int = 0
    input_order: Tensor | None = None

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the matrix."""
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)


def group_weight(weight: PackedWeight) -> GroupedWeight:
    """Lay out a packed weight for GPUs, once, when a model is loaded.

    Nothing is rounded. Q8_0, Q4_0, Q4_1, GPTQ, AWQ and float8 keep their size; the K types
    grow, since the products of their nested scales are kept as float32: Q4_K from 4.5 to 6 bits
    a weight, Q5_K from 5.5 to 10, Q6_K from 6.6 to 10.

    Args:
        weight: Of one of `GROUPED_KINDS`.

    Raises:
        ValueError: The kind is another.
    """
    if weight.kind not in GROUPED_KINDS:
        raise ValueError(f"weights of {weight.kind} have no groups; {GROUPED_KINDS} have")
    if weight.kind == "e4m3":
        return _group_fp8(weight)
    fields = separate(weight.data, weight.kind, weight.scales, weight.shape[1])
    scales, zeros, minima = _scales_of(fields, weight.kind)
    num_rows, inputs = weight.shape
    group_size = inputs // scales.shape[1]
    if weight.kind == "u4z":
        group_size *= (merged := _equal_run(scales, zeros))
        scales, zeros = scales[:, ::merged], zeros if zeros is None else zeros[:, ::merged]
    codes = fields.values[:num_rows]
    codes = codes.to(torch.int8) if weight.kind in ("q8_0", "q5_k", "q6_k") else _pack(codes)
    rest = [x if x is None else x[:num_rows].contiguous() for x in (scales, zeros, minima)]
    assert rest[0] is not None
    zero = 8 if weight.kind == "q4_0" else 0
    return GroupedWeight(
        codes.contiguous(), rest[0], rest[1], rest[2], group_size, zero, weight.input_order
    )


def _scales_of(fields: WeightFields, kind: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return scales, zeros and minima, ``[rows, groups]`` each or None."""
    if kind in ("q8_0", "q4_0"):
        return fields.scales, None, None
    if kind == "u4z":
        assert fields.minimums is not None
        return fields.scales, fields.minimums.to(torch.uint8), None
    if kind == "q4_1":
        return fields.scales, None, fields.minimums
    assert fields.sub_scales is not None
    repeats = fields.sub_scales.shape[1] // fields.scales.shape[1]
    scales = _repeat(fields.scales, repeats) * fields.sub_scales.float()
    if fields.sub_minimums is None:
        return scales, None, None
    assert fields.minimums is not None
    return scales, None, -_repeat(fields.minimums, repeats) * fields.sub_minimums.float()


def _repeat(of_blocks: Tensor, repeats: int) -> Tensor:
    return of_blocks.float().repeat_interleave(repeats, dim=1)


def _equal_run(scales: Tensor, zeros: Tensor | None) -> int:
    """Return how many groups of 32 can be one: GPTQ and AWQ come in groups of 128 mostly."""
    for run in (4, 2):
        if scales.shape[1] % run == 0 and _repeats(scales, run) and _repeats(zeros, run):
            return run
    return 1


def _repeats(x: Tensor | None, run: int) -> bool:
    """Whether every `run` columns are equal."""
    return x is None or torch.equal(x, x[:, ::run].repeat_interleave(run, dim=1))


def _group_fp8(weight: PackedWeight) -> GroupedWeight:
    """Undo the interleaving of 16 rows of float8, and of their scales."""
    num_rows, inputs = weight.shape
    assert weight.scales is not None
    panels = weight.data.view(len(weight.data), inputs, -1)  # [num_panels, in_features, 16]
    codes = panels.transpose(1, 2).reshape(-1, inputs)[:num_rows]
    scales = weight.scales.transpose(1, 2).reshape(-1, weight.scales.shape[1])[:num_rows]
    return GroupedWeight(
        codes.contiguous().view(torch.float8_e4m3fn),
        scales.contiguous(),
        None,
        None,
        weight.scale_block or inputs,
        input_order=weight.input_order,
    )


def _pack(codes: Tensor) -> Tensor:
    """Pack ``[rows, columns]`` of 4 bits into ``[rows, columns / 2]`` bytes."""
    return codes[:, 0::2] | codes[:, 1::2] << 4
