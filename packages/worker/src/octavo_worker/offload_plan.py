"""Which layers' weights stay in host memory, for ``--cpu-offload-gb``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo_core.errors import ConfigError
from octavo_worker.layers.weight_entry import WeightEntry

NUM_STAGED = 2
"""Layers that have room on the device: one is computed with while the next one is copied."""

ALIGNMENT = 256
"""Bytes at which each tensor of a layer starts in its buffer, as torch's allocator has it."""

_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True)
class OffloadPlan:
    """Layers whose weights are fetched while a step runs.

    Attributes:
        layers: Names of the tensors of each of them, by the layer's index.
        num_bytes: Of all of them: host memory, and what a step copies.
        staged_bytes: Of the buffers on the device that they are copied to.
        num_layers: Layers of the model, or of this worker's stage.
    """

    layers: Mapping[int, tuple[str, ...]]
    num_bytes: int
    staged_bytes: int
    num_layers: int

    @property
    def names(self) -> frozenset[str]:
        """All tensors that stay on the host."""
        return frozenset(name for names in self.layers.values() for name in names)


def plan_offload(layout: Sequence[WeightEntry], dtype: torch.dtype, budget: int) -> OffloadPlan:
    """Choose as many layers as the budget holds, evenly spread.

    Between two of them as many others are computed as can be, so that a copy has time.

    Args:
        layout: All tensors of the model, or of a worker's part.
        dtype: Type of weights.
        budget: Bytes of host memory for them.

    Raises:
        ConfigError: Too few layers fit to free anything on the device; the message says how
            much would.
    """
    names: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for entry in layout:
        found = _LAYER.search(entry.name)
        if found is not None:
            index = int(found[1])
            names.setdefault(index, []).append(entry.name)
            sizes[index] = sizes.get(index, 0) + entry_bytes(entry, dtype)
    indices = sorted(sizes)
    for count in range(len(indices), NUM_STAGED, -1):
        chosen = [indices[number * len(indices) // count] for number in range(count)]
        num_bytes = sum(sizes[index] for index in chosen)
        if num_bytes <= budget:
            return OffloadPlan(
                {index: tuple(names[index]) for index in chosen},
                num_bytes,
                NUM_STAGED * max(sizes[index] for index in chosen),
                len(indices),
            )
    least = sum(sorted(sizes.values())[: NUM_STAGED + 1])
    reason = f"it takes at least {NUM_STAGED + 1} layers, {_gib(least)}"
    if len(indices) <= NUM_STAGED:
        reason = f"there are only {len(indices)} layers here"
    raise ConfigError(
        f"cpu_offload_gb is {_gib(budget)}, which frees nothing: {NUM_STAGED} layers need room on "
        f"the device to be computed with, so {reason}; leave it out, or give more.",
        field="cpu_offload_gb",
    )


def entry_bytes(entry: WeightEntry, dtype: torch.dtype) -> int:
    """Return what a tensor takes in a layer's buffer."""
    width = (entry.dtype or dtype).itemsize
    num_bytes = sum(math.prod(part.read_shape) for part in entry.parts) * width
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
