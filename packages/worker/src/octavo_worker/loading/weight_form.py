"""How the weights of a model are kept in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

QUANTIZED_BLOCK = 32
"""Inputs that share a scale; rows are whole blocks."""

VOCABULARY_KIND = "q8_0"
"""Kind of embedding and head where the rest gets 4 bits: each error there goes straight into the
logits. llama.cpp's 4-bit mixtures spare them too."""


@dataclass(frozen=True)
class WeightForm:
    """What the loader makes of a checkpoint's tensors.

    Attributes:
        dtype: Type of what is not packed: everything, or norms and biases only.
        quantization: ``none`` unpacks every tensor to `dtype`. Otherwise matrices are packed
            for the CPU kernels: ``auto`` as they are stored, ``q8_0``, ``q4_0`` and ``w8a8``
            quantized while they load.
        dense_dtype: With ``auto``, the type of matrices that are not quantized; None keeps
            theirs.
        for_cpu_kernels: With ``none``, matrices are laid out for the CPU kernels, with every
            float32 as it is.
    """

    dtype: torch.dtype
    quantization: str = "none"
    dense_dtype: torch.dtype | None = None
    for_cpu_kernels: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether matrices are kept as they are stored, or quantized, and not unpacked."""
        return self.quantization != "none"
