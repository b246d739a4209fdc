"""From a model's files to a model that can run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_worker.layer_copies import LayerCopies
from octavo_worker.layers.offloaded_weights import OffloadedWeights
from octavo_worker.layers.weight import Weight
from octavo_worker.layers.weight_entry import WeightEntry
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.loading.load_weights import STAGE
from octavo_worker.models import Model, has_definition, resolve_model_class
from octavo_worker.offload_plan import plan_offload

logger = logging.getLogger(__name__)


class Offload(NamedTuple):
    """What of the weights is to stay in host memory.

    Attributes:
        num_bytes: At most so much.
        copies: To the device.
    """

    num_bytes: int
    copies: LayerCopies

    def load(
        self,
        layout: list[WeightEntry],
        dtype: torch.dtype,
        load: Callable[[frozenset[str]], dict[str, Weight]],
    ) -> OffloadedWeights:
        """Load a layout's tensors, and keep those of some layers on the host.

        Args:
            layout: The tensors.
            dtype: Type of weights.
            load: Loads them, those that it is given the names of to host memory.

        Raises:
            ConfigError: Too little is to stay there to free anything.
        """
        plan = plan_offload(layout, dtype, self.num_bytes)
        logger.info(
            "%d of %d layers stay in host memory: %.2f GiB, which each step copies; %.2f GiB on "
            "the device are for the two at hand",
            len(plan.layers),
            plan.num_layers,
            plan.num_bytes / 2**30,
            plan.staged_bytes / 2**30,
        )
        return OffloadedWeights(load(plan.names), plan, self.copies)


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
    offload: Offload | None = None,
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
        offload: What is to stay in host memory; None for nothing. Not for models that run
            through transformers.

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
    model_class = resolve_model_class(spec)

    def load(on_host: frozenset[str] = frozenset()) -> dict[str, Weight]:
        return load_weights(spec, path, form, device, on_progress, load_format, on_host=on_host)

    weights: Mapping[str, Weight]
    if offload is None:
        weights = load()
    else:
        weights = offload.load(model_class.weight_layout(spec), form.dtype, load)
    kinds = {
        part.kind for weight in weights.values() if isinstance(weight, tuple) for part in weight
    }
    model = model_class(spec, weights, max_model_len, device)
    logger.info("%s runs by its own definition", spec.architecture)
    return LoadedModel(model, frozenset(kinds))
