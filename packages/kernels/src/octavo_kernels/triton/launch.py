"""What every launcher does around its kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the device of `tensor` current, since Triton launches on the current one."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)
    return guard


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def with_dense_rows(x: Tensor) -> Tensor:
    """Return `x`, copied if its last dimension is not contiguous.

    The other strides are given to the kernels, so slices of a fused projection are not copied.
    """
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
