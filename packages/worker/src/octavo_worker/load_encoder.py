"""From an encoder's files to a model that makes embeddings."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo_core.errors import ModelError
from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import read_model_spec
from octavo_worker.loading import WeightForm
from octavo_worker.loading.load_weights import load_layout
from octavo_worker.models.bert import BertModel

ENCODERS = {"BertModel": BertModel, "BertForMaskedLM": BertModel}


def load_encoder(
    path: str | Path,
    form: WeightForm,
    device: torch.device,
    on_progress: ProgressCallback = lambda stage, progress: None,
) -> BertModel:
    """Load an encoder-only model.

    Args:
        path: A folder with safetensors files.
        form: How weights are to be kept.
        device: Where the model is to run.
        on_progress: Told about the share of weights that is there.

    Raises:
        ModelError: The model is no encoder that is known, or a file or tensor is missing or
            damaged.
    """
    spec = read_model_spec(path)
    encoder = ENCODERS.get(spec.architecture)
    if encoder is None:
        raise ModelError(
            f"architecture {spec.architecture!r} is no encoder that is supported; supported: "
            f"{', '.join(ENCODERS)}.",
            field="architectures",
        )
    layout = encoder.weight_layout(spec)
    return encoder(spec, load_layout(layout, spec, path, form, device, on_progress))
