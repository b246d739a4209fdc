"""From a model's files to the part of it that one of several workers runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.parallel_weights import ParallelWeights
from octavo_worker.layers.weight import Weight
from octavo_worker.load_model import LoadedModel, Offload
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from octavo_worker.parallel_model import ParallelModel
from octavo_worker.parallel_state import ParallelGroup
from octavo_worker.sharding import (
    entries_of_rank,
    partial_names,
    spec_of_rank,
    vocabulary_of_rank,
)

logger = logging.getLogger(__name__)


def load_share(
    spec: ModelSpec,
    path: str | Path,
    form: WeightForm,
    max_model_len: int,
    device: torch.device,
    on_progress: ProgressCallback,
    load_format: str = "auto",
    offload: Offload | None = None,
    *,
    group: ParallelGroup,
    dtype: torch.dtype,
) -> LoadedModel:
    """Load one worker's part of a model; see `octavo_worker.load_model.load_model`.

    Args:
        group: The other workers.
        dtype: Type of hidden states, which go between them.

    Raises:
        ModelError: A file or tensor is missing, damaged or of a form that can't be divided.
    """
    place = group.place
    model_class = resolve_model_class(spec)
    entries = entries_of_rank(spec, place, model_class.weight_layout)

    def load(on_host: frozenset[str] = frozenset()) -> dict[str, Weight]:
        return load_weights(spec, path, form, device, on_progress, load_format, place, on_host)

    weights: Mapping[str, Weight]
    weights = load() if offload is None else offload.load(entries, form.dtype, load)
    kinds = {
        part.kind for weight in weights.values() if isinstance(weight, tuple) for part in weight
    }
    mine = ParallelWeights(weights, group, partial_names(entries), vocabulary_of_rank(spec, place))
    model = model_class(spec_of_rank(spec, place), mine, max_model_len, device)
    logger.info(
        "%s runs by its own definition: part %d of %d of each layer, stage %d of %d",
        spec.architecture,
        place.tensor_rank + 1,
        place.tensor_parallel_size,
        place.stage + 1,
        place.pipeline_parallel_size,
    )
    return LoadedModel(ParallelModel(model, spec, group, dtype, device), frozenset(kinds))
