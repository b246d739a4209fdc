"""From a model's files to the tensors that its definition asks for."""

from __future__ import annotations

import logging
import math
import re
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_worker.loading.checkpoint import Checkpoint
from octavo_worker.loading.gguf import GGUFCheckpoint
from octavo_worker.loading.safetensors import SafetensorsCheckpoint
from octavo_worker.models import WeightEntry, WeightPart, resolve_model_class

logger = logging.getLogger(__name__)

STAGE = "loading weights"


def load_weights(
    spec: ModelSpec,
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: ProgressCallback,
) -> dict[str, Tensor]:
    """Load every tensor of a model.

    Args:
        spec: The model's hyper-parameters.
        path: A folder with safetensors files, or a .gguf file.
        dtype: Type of the result.
        device: Where the result is to be.
        on_progress: Told about the share of weights that is there.

    Returns:
        The tensors of the model class's `weight_layout`, by its names.

    Raises:
        ModelError: A file or tensor is missing, damaged, of a wrong shape or not supported.
            The message names the file and the tensor.
    """
    layout = resolve_model_class(spec).weight_layout(spec)
    with closing(open_checkpoint(path)) as checkpoint:
        _check_nothing_left_over(spec, layout, checkpoint)
        total = sum(math.prod(part.shape) for entry in layout for part in entry.parts)
        done = 0
        weights: dict[str, Tensor] = {}
        for entry in layout:
            weights[entry.name] = _load_entry(entry, weights, checkpoint, dtype, device)
            done += sum(math.prod(part.shape) for part in entry.parts)
            on_progress(STAGE, done / total)
    return weights


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder with safetensors files, or a .gguf file.

    Raises:
        ModelError: There is nothing there that can be read.
    """
    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    return GGUFCheckpoint(path)


def _load_entry(
    entry: WeightEntry,
    weights: dict[str, Tensor],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if entry.tied_to is not None and entry.parts[0].name not in checkpoint.names:
        return weights[entry.tied_to]
    rows = sum(part.shape[0] for part in entry.parts)
    tensor = torch.empty((rows, *entry.parts[0].shape[1:]), dtype=dtype, device=device)
    first = 0
    for part in entry.parts:
        _read(part, checkpoint, tensor[first : first + part.shape[0]])
        first += part.shape[0]
    # A fine-tune may have stored its head though it is tied; if it was trained apart, it
    # counts, as in transformers. If it is the same, it need not be there twice.
    if entry.tied_to is not None and torch.equal(tensor, weights[entry.tied_to]):
        return weights[entry.tied_to]
    return tensor


def _read(part: WeightPart, checkpoint: Checkpoint, out: Tensor) -> None:
    place = checkpoint.place(part.name)
    if part.name not in checkpoint.names:
        raise ModelError(f"{place}: tensor {part.name} is missing.", field=part.name)
    shape = checkpoint.shape(part.name)
    if shape != part.shape:
        raise ModelError(
            f"{place}: tensor {part.name} has shape {list(shape)}; the model's configuration "
            f"asks for {list(part.shape)}.",
            field=part.name,
        )
    checkpoint.read_into(part.name, out)


def _check_nothing_left_over(
    spec: ModelSpec, layout: list[WeightEntry], checkpoint: Checkpoint
) -> None:
    """Refuse a checkpoint whose layers hold more than the model computes.

    Left-out biases or norms would give fluent nonsense. Tensors outside the layers
    (value heads, projectors) and buffers of old versions change nothing, and are skipped.
    """
    used = {part.name for entry in layout for part in entry.parts}
    for name in sorted(set(checkpoint.names) - used):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or name.endswith("rotary_emb.inv_freq"):
            logger.info("%s: tensor %s is not used", checkpoint.place(name), name)
        elif int(layer[1]) < spec.num_hidden_layers:
            raise ModelError(
                f"{checkpoint.place(name)}: tensor {name} is no part of {spec.architecture} as "
                f"its configuration describes it.",
                field=name,
            )
