"""Refuse weights that are not numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_core.errors import ModelError


def check_finite(tensor: Tensor, name: str, place: str) -> None:
    """Raise if a weight is NaN or infinite: a model with one answers nonsense to everybody.

    One pass over memory, which reading the file has just brought near: 0.1 s a GiB.

    Args:
        tensor: Of a floating-point type.
        name: Of the tensor, for the message.
        place: Its file.

    Raises:
        ModelError: It is.
    """
    # One sum instead of a mask of the tensor's size: what is not finite makes it so.
    if tensor.numel() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
        if torch.isfinite(tensor).all():
            return  # finite numbers whose sum is too large
        raise ModelError(
            f"{place}: tensor {name} has numbers that are NaN or infinite; the file is damaged.",
            field=name,
        )
