"""Memory that several tensors share, because a kernel takes them all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from octavo_worker.layers.weight_entry import WeightEntry


class Stacks:
    """Gives out memory for tensors; those of one stack lie one after the other.

    Args:
        layout: All tensors that are to be loaded.
    """

    def __init__(self, layout: Sequence[WeightEntry]) -> None:
        self._counts = Counter(entry.stack for entry in layout)
        self._places: dict[str, Iterator[Tensor]] = {}

    def room_for(
        self, entry: WeightEntry, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for a tensor, not written yet."""
        if entry.stack is None:
            return torch.empty(shape, dtype=dtype, device=device)
        if entry.stack not in self._places:
            whole = torch.empty((self._counts[entry.stack], *shape), dtype=dtype, device=device)
            self._places[entry.stack] = iter(whole.unbind())
        return next(self._places[entry.stack])
