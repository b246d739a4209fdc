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
