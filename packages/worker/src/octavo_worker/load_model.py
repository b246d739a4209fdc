"""From a model's files to a model that can run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.loading.load_weights import STAGE
from octavo_worker.models import Model, has_definition, resolve_model_class

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """A model, its weights loaded.

    Attributes:
        model: It.
        weight_kinds: Kinds of its packed weights.
    """

    model: Model
    weight_kinds: frozenset[str]


def load_model(
    spec: ModelSpec,
    path: str | Path,
    form: WeightForm,
    max_model_len: int,
    device: torch.device,
    on_progress: ProgressCallback,
    load_format: str = "auto",
) -> LoadedModel:
    """Load a model by its own definition, or by that of transformers if there is none here.

    Args:
        spec: Hyper-parameters.
        path: A folder with safetensors files, or a .gguf file.
        form: How weights are to be kept.
        max_model_len: Positions that there can be.
        device: Where the model is to run.
        on_progress: Told about the share of weights that is there.
        load_format: ``dummy`` makes random weights, and reads none.

    Raises:
        ModelError: The model is not supported, or a file or tensor is missing or damaged.
    """
    if not has_definition(spec):
        # Imports transformers, so only where it is needed.
        from octavo_worker.models.transformers_model import TransformersModel

        on_progress(STAGE, 0.0)
        fallback = TransformersModel(
            spec, Path(path), form.dtype, device, is_dummy=load_format == "dummy"
        )
        on_progress(STAGE, 1.0)
        logger.info("%s runs through transformers, over our paged KV cache", spec.architecture)
        return LoadedModel(fallback, frozenset())
    weights = load_weights(spec, path, form, device, on_progress, load_format)
    kinds = {
        part.kind for weight in weights.values() if isinstance(weight, tuple) for part in weight
    }
    model = resolve_model_class(spec)(spec, weights, max_model_len, device)
    logger.info("%s runs by its own definition", spec.architecture)
    return LoadedModel(model, frozenset(kinds))
