"""Whether weights fit into memory, before they are read."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from octavo_core.errors import ConfigError
from octavo_kernels import WEIGHT_KINDS
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart
from octavo_worker.loading.checkpoint import Checkpoint
from octavo_worker.loading.weight_form import VOCABULARY_KIND, WeightForm
from octavo_worker.memory import free_memory, gib

_CPU = torch.device("cpu")


def check_room(
    layout: Sequence[WeightEntry],
    checkpoint: Checkpoint,
    form: WeightForm,
    device: torch.device,
    on_host: Collection[str] = (),
) -> None:
    """Refuse weights that are larger than what is free: the system would end the process.

    Args:
        layout: What will be loaded, under the checkpoint's names.
        checkpoint: It.
        form: How weights will be kept.
        device: Where.
        on_host: Tensors that will be on the host all the same.

    Raises:
        ConfigError: The message has both numbers, and what makes weights smaller.
    """
    needed = {device: 0, _CPU: 0}
    for entry in layout:
        where = _CPU if entry.name in on_host else device
        needed[where] += sum(kept_bytes(entry, part, checkpoint, form) for part in entry.parts)
    for where, num_bytes in needed.items():
        require_room(num_bytes, where, _advice(form, where))


def require_room(num_bytes: int, where: torch.device, advice: str) -> None:
    """Refuse weights of so many bytes if there are not as many free on a device.

    Raises:
        ConfigError: The message has both numbers, and the advice.
    """
    free = free_memory(where)
    if num_bytes > free:
        raise ConfigError(
            f"the weights take {gib(num_bytes)}, but only {gib(free)} of {where} memory are "
            f"free; {advice}.",
            field="model",
        )


def kept_bytes(
    entry: WeightEntry, part: WeightPart, checkpoint: Checkpoint, form: WeightForm
) -> int:
    """Return the bytes that one tensor of a checkpoint will take, or nearly so."""
    if part.name not in checkpoint.names:  # tied, or missing, which the loader will say
        return 0
    count = math.prod(part.read_shape)
    plain = count * (entry.dtype or form.dtype).itemsize
    if not form.is_packed or entry.is_plain or len(part.shape) != 2:
        return plain
    if form.quantization == "auto":
        if form.dense_dtype is not None and part.transform is not None:
            return count * form.dense_dtype.itemsize
        return checkpoint.num_bytes(part.name) * count // max(math.prod(part.shape), 1)
    kind = VOCABULARY_KIND if entry.is_vocabulary else form.quantization
    return count * WEIGHT_KINDS[kind].block_bytes // WEIGHT_KINDS[kind].block


def _advice(form: WeightForm, device: torch.device) -> str:
    if device.type != "cpu":
        return "use --cpu-offload-gb or --tensor-parallel-size, or end what uses the device"
    if form.quantization == "none":
        return "use --quantization auto or q4_0, or a smaller model"
    return "use --quantization q4_0, or a smaller model"
