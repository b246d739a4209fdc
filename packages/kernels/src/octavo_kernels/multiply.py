"""Products over packed weights as entry points that larger kernels call."""

from __future__ import annotations

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.packed_weight import DENSE_KINDS, WEIGHT_KINDS

MULTIPLY = {
    kind: Kernel(
        f"{'dense' if kind in DENSE_KINDS else 'quantized'}_matmul.multiply_{kind}", "q" * 12
    )
    for kind in WEIGHT_KINDS
}
"""By kind. Arguments: x (quantized or float32) and the bytes of a row, its rows, the weight's
``out_features`` and ``in_features``, its data, bias, scales and their block, the result and the
bytes of a row, and whether it is added to what is there."""

ARGUMENT_BYTES = 128
"""Room for the arguments of one call of one thread."""


def quantized_bytes(inputs: int) -> int:
    """Bytes of a row of activations that quantized weights are multiplied with.

    A block of 32 is laid out in `octavo_kernels.cpu.activations`.
    """
    return inputs // 32 * 44
