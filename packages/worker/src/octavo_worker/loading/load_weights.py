"""From a model's files to the tensors that its definition asks for."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octavo_core.errors import ConfigError, ModelError
from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_kernels import (
    WEIGHT_KINDS,
    HugePageMemory,
    PackedWeight,
    concatenate_weights,
    pack_dense_weight,
    quantize_weight,
)
from octavo_worker.layers.weight import Packed, Weight
from octavo_worker.loading.checkpoint import Checkpoint
from octavo_worker.loading.dummy import DummyCheckpoint
from octavo_worker.loading.gguf import GGUFCheckpoint
from octavo_worker.loading.mxfp4_checkpoint import Mxfp4Checkpoint
from octavo_worker.loading.quantized import QuantizedCheckpoint
from octavo_worker.loading.room import check_room
from octavo_worker.loading.safetensors import SafetensorsCheckpoint
from octavo_worker.loading.stacks import Stacks
from octavo_worker.loading.weight_form import QUANTIZED_BLOCK, VOCABULARY_KIND, WeightForm
from octavo_worker.models import WeightEntry, WeightPart, resolve_model_class
from octavo_worker.parallel_state import ONLY_WORKER, ParallelPlace
from octavo_worker.sharding import entries_of_rank

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")
# Of old versions of transformers; GPT-2's masks among them.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

STAGE = "loading weights"


def load_weights(
    spec: ModelSpec,
    path: str | Path,
    form: WeightForm,
    device: torch.device,
    on_progress: ProgressCallback,
    load_format: str = "auto",
    place: ParallelPlace = ONLY_WORKER,
    on_host: Collection[str] = (),
) -> dict[str, Weight]:
    """Load every tensor of a model, or a worker's part of it.

    Args:
        spec: The whole model's hyper-parameters.
        path: A folder with safetensors files, or a .gguf file.
        form: How weights are to be kept.
        device: Where the result is to be; packed matrices are for a CPU.
        on_progress: Told about the share of weights that is there.
        load_format: ``dummy`` makes random weights, and reads none.
        place: Of this worker, which reads only its part.
        on_host: Tensors that are to be in host memory, whatever the device.

    Returns:
        The tensors of the model class's `weight_layout`, by its names.

    Raises:
        ModelError: A file or tensor is missing, damaged, of a wrong shape or not supported.
            The message names the file and the tensor.
    """
    layout = resolve_model_class(spec).weight_layout(spec)
    return load_layout(layout, spec, path, form, device, on_progress, load_format, place, on_host)


def load_layout(
    layout: list[WeightEntry],
    spec: ModelSpec,
    path: str | Path,
    form: WeightForm,
    device: torch.device,
    on_progress: ProgressCallback,
    load_format: str = "auto",
    place: ParallelPlace = ONLY_WORKER,
    on_host: Collection[str] = (),
) -> dict[str, Weight]:
    """Load the tensors of a layout; see `load_weights`."""
    opened: Checkpoint
    if load_format == "dummy":
        opened = DummyCheckpoint(layout)
    else:
        method = None if spec.quantization is None else spec.quantization.method
        opened = open_checkpoint(path, method)
    with closing(opened) as checkpoint:
        layout = [_as_stored(entry, checkpoint) for entry in layout]
        _check_nothing_left_over(spec, layout, checkpoint)
        if place.world_size > 1:
            mine = entries_of_rank(spec, place, resolve_model_class(spec).weight_layout)
            layout = [_as_stored(entry, checkpoint) for entry in mine]
        for entry in layout:
            if not _is_left_out(entry, checkpoint):
                _check_parts(entry, checkpoint)
        check_room(layout, checkpoint, form, device, on_host)
        total = sum(math.prod(part.read_shape) for entry in layout for part in entry.parts)
        done = 0
        on_progress(STAGE, 0.0)
        stacks = Stacks(layout)
        weights: dict[str, Weight] = {}
        memory = HugePageMemory()
        for entry in layout:
            where = torch.device("cpu") if entry.name in on_host else device
            weights[entry.name] = _load_entry(
                entry, weights, checkpoint, form, where, stacks, memory
            )
            done += sum(math.prod(part.read_shape) for part in entry.parts)
            on_progress(STAGE, done / total)
    if not place.is_first_stage:  # there only for what is tied to it
        for entry in layout:
            weights.pop(entry.tied_to or "", None)
    return weights


def open_checkpoint(path: str | Path, method: str | None = None) -> Checkpoint:
    """Open a folder with safetensors files, or a .gguf file.

    Args:
        path: The folder or file.
        method: How its matrices are quantized, by a folder's config.json; None if not.

    Raises:
        ModelError: There is nothing there that can be read.
    """
    path = Path(path)
    if path.is_dir():
        if method is None:
            return SafetensorsCheckpoint(path)
        return Mxfp4Checkpoint(path) if method == "mxfp4" else QuantizedCheckpoint(path)
    return GGUFCheckpoint(path)


def _as_stored(entry: WeightEntry, checkpoint: Checkpoint) -> WeightEntry:
    """Name an entry's parts as the checkpoint does, and describe them as they lie there."""
    names = checkpoint.names
    parts = [part._replace(name=_stored_name(part.name, names)) for part in entry.parts]
    if checkpoint.outputs_first:
        parts = [part.outputs_first() for part in parts]
    return entry._replace(parts=tuple(parts))


def _stored_name(name: str, names: Collection[str]) -> str:
    """Find a tensor that was saved from the model without its head, or from within a larger one.

    GPT-2's files have ``wte.weight`` for ``transformer.wte.weight``; multimodal models have
    ``language_model.`` before or behind ``model.``.
    """
    if name in names:
        return name
    base, _, rest = name.partition(".")
    for other in (rest, f"language_model.{name}", f"{base}.language_model.{rest}"):
        if other in names:
            return other
    return name


def _load_entry(
    entry: WeightEntry,
    weights: Mapping[str, Weight],
    checkpoint: Checkpoint,
    form: WeightForm,
    device: torch.device,
    stacks: Stacks,
    memory: HugePageMemory,
) -> Weight:
    if entry.tied_to is not None and _is_left_out(entry, checkpoint):
        return weights[entry.tied_to]
    loaded: Weight
    for_kernels = form.is_packed or form.for_cpu_kernels
    if for_kernels and not entry.is_plain and len(entry.parts[0].shape) == 2:
        loaded = _join([_pack(part, checkpoint, form, entry.is_vocabulary) for part in entry.parts])
    else:
        loaded = _read_whole(entry, checkpoint, entry.dtype or form.dtype, device, stacks)
    # A fine-tune may have stored its head though it is tied; if it was trained apart, it
    # counts, as in transformers. If it is the same, it need not be there twice.
    if entry.tied_to is not None and _equal(loaded, weights[entry.tied_to]):
        return weights[entry.tied_to]
    if isinstance(loaded, Tensor):
        return loaded
    return tuple(replace(part, data=memory.keep(part.data)) for part in loaded)


def _read_whole(
    entry: WeightEntry,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    stacks: Stacks,
) -> Tensor:
    """Read an entry's parts into one tensor."""
    if any(part.transform is not None for part in entry.parts):
        parts = [_read_transformed(part, checkpoint).to(device, dtype) for part in entry.parts]
        return torch.cat(parts).contiguous()
    shapes = [part.read_shape for part in entry.parts]
    rows = sum(shape[0] for shape in shapes)
    tensor = stacks.room_for(entry, (rows, *shapes[0][1:]), dtype, device)
    first = 0
    for part, shape in zip(entry.parts, shapes, strict=True):
        checkpoint.read_into(part.name, tensor[first : first + shape[0]], part.piece)
        first += shape[0]
    return tensor


def _read_transformed(part: WeightPart, checkpoint: Checkpoint) -> Tensor:
    """Read one tensor in float32, and make the model's of it."""
    wide = torch.empty(part.read_shape)
    checkpoint.read_into(part.name, wide, part.piece)
    return wide if part.transform is None else part.transform(wide)


def _pack(
    part: WeightPart, checkpoint: Checkpoint, form: WeightForm, is_vocabulary: bool
) -> PackedWeight:
    """Read one matrix in the form that it is to be kept in."""
    if form.quantization == "none":
        return pack_dense_weight(_read_transformed(part, checkpoint).contiguous())
    if form.quantization == "auto":
        if part.transform is not None:
            dtype = form.dense_dtype or checkpoint.float_dtype(part.name)
            return pack_dense_weight(_read_transformed(part, checkpoint).to(dtype).contiguous())
        return checkpoint.read_packed(part.name, form.dense_dtype, part.piece)
    kind = form.quantization
    if kind == "q4_0" and is_vocabulary:
        kind = VOCABULARY_KIND
    wide = _read_transformed(part, checkpoint).contiguous()
    if wide.shape[1] % QUANTIZED_BLOCK:
        raise ConfigError(
            f"quantization={form.quantization} needs inputs in multiples of {QUANTIZED_BLOCK}, "
            f"but tensor {part.name} has {wide.shape[1]}; use --quantization auto.",
            field="quantization",
        )
    return quantize_weight(wide, kind)


def _join(parts: list[PackedWeight]) -> Packed:
    """Make one matrix of the parts if their kinds and rows allow it: one product in place of two.

    A file may keep values in more bits than keys (GGUF's K mixtures do); those stay apart.
    """
    rows = WEIGHT_KINDS[parts[0].kind].rows
    alike = all(
        part.kind == parts[0].kind
        and part.scale_block == parts[0].scale_block
        and part.input_order is None
        for part in parts
    )
    if len(parts) > 1 and alike and not any(part.shape[0] % rows for part in parts[:-1]):
        return (concatenate_weights(parts),)
    return tuple(parts)


def _equal(weight: Weight, other: Weight) -> bool:
    """Whether two are of one form and the same bit for bit."""
    if isinstance(weight, Tensor):
        return isinstance(other, Tensor) and torch.equal(weight, other)
    return not isinstance(other, Tensor) and all(
        a.kind == b.kind and torch.equal(a.data, b.data) for a, b in zip(weight, other, strict=True)
    )


def _is_left_out(entry: WeightEntry, checkpoint: Checkpoint) -> bool:
    """Whether another tensor stands in for one that the checkpoint hasn't."""
    return entry.tied_to is not None and entry.parts[0].name not in checkpoint.names


def _check_parts(entry: WeightEntry, checkpoint: Checkpoint) -> None:
    for part in entry.parts:
        _check_part(part, checkpoint)


def _check_part(part: WeightPart, checkpoint: Checkpoint) -> None:
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


def _check_nothing_left_over(
    spec: ModelSpec, layout: list[WeightEntry], checkpoint: Checkpoint
) -> None:
    """Refuse a checkpoint whose layers hold more than the model computes.

    Left-out biases or norms would give fluent nonsense. Tensors outside the layers
    (value heads, projectors) and buffers of old versions change nothing, and are skipped.
    """
    used = {part.name for entry in layout for part in entry.parts}
    stacks = {name[: layer.start(1)] for name in used if (layer := _LAYER.search(name))}
    for name in sorted(set(checkpoint.names) - used):
        layer = _LAYER.search(name)
        of_layers = layer is not None and name[: layer.start(1)] in stacks
        if layer is None or not of_layers or name.endswith(_BUFFERS):
            logger.info("%s: tensor %s is not used", checkpoint.place(name), name)
        elif int(layer[1]) < spec.num_hidden_layers:
            raise ModelError(
                f"{checkpoint.place(name)}: tensor {name} is no part of {spec.architecture} as "
                f"its configuration describes it.",
                field=name,
            )
