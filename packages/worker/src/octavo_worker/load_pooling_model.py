"""From the files of a model that pools to a model that can run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from octavo_core.errors import ModelError
from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_core.pooler_spec import PoolerSpec
from octavo_worker.layers.classification_heads import Head, head_layout, make_head
from octavo_worker.loading import WeightForm
from octavo_worker.loading.load_weights import load_layout
from octavo_worker.models.bert import BertModel, RobertaModel
from octavo_worker.models.model import Model
from octavo_worker.models.registry import MODELS

logger = logging.getLogger(__name__)

ENCODERS: dict[str, type[BertModel]] = {
    "BertForMaskedLM": BertModel,
    "BertForSequenceClassification": BertModel,
    "BertModel": BertModel,
    "CamembertForSequenceClassification": RobertaModel,
    "CamembertModel": RobertaModel,
    "RobertaForMaskedLM": RobertaModel,
    "RobertaForSequenceClassification": RobertaModel,
    "RobertaModel": RobertaModel,
    "XLMRobertaForSequenceClassification": RobertaModel,
    "XLMRobertaModel": RobertaModel,
}
# What stands at the end of a name in place of ForCausalLM.
_VARIANTS = ("ForSequenceClassification", "Model")
_LM_HEAD = "lm_head.weight"


class LoadedPoolingModel(NamedTuple):
    """A model that pools, its weights loaded.

    Attributes:
        encoder: It, if it is an encoder.
        decoder: Otherwise.
        head: Scores classes, if it was made for that.
        weight_kinds: Kinds of its packed weights.
    """

    encoder: BertModel | None
    decoder: Model | None
    head: Head | None
    weight_kinds: frozenset[str]


def load_pooling_model(
    spec: ModelSpec,
    pooler: PoolerSpec,
    path: str | Path,
    form: WeightForm,
    max_model_len: int,
    device: torch.device,
    on_progress: ProgressCallback = lambda stage, progress: None,
    load_format: str = "auto",
) -> LoadedPoolingModel:
    """Load an encoder, or a decoder without its language-model head.

    Args:
        spec: Hyper-parameters.
        pooler: What it is made for.
        path: A folder with safetensors files, or a .gguf file.
        form: How weights are to be kept.
        max_model_len: Positions that there can be.
        device: Where the model is to run.
        on_progress: Told about the share of weights that is there.
        load_format: ``dummy`` makes random weights, and reads none.

    Raises:
        ModelError: The model is not supported, or a file or tensor is missing or damaged.
    """
    encoder = ENCODERS.get(spec.architecture)
    decoder = MODELS.get(causal_name(spec.architecture))
    if encoder is None and decoder is None:
        decoders = ", ".join(sorted(MODELS))
        raise ModelError(
            f"architecture {spec.architecture!r} can't be pooled; what can: "
            f"{', '.join(ENCODERS)}, and without head or with one for classes {decoders}.",
            field="architectures",
        )
    if decoder is not None:
        # The head is not used, and few such files have one.
        spec = msgspec.structs.replace(spec, tie_word_embeddings=True)
        layout = decoder.weight_layout(spec)
        kind = "decoder"
    else:
        assert encoder is not None
        layout = encoder.weight_layout(spec)
        kind = encoder.prefix
    if pooler.is_classifier:
        layout += head_layout(spec, kind, len(pooler.labels))
    weights = load_layout(layout, spec, path, form, device, on_progress, load_format)
    head = make_head(weights, kind) if pooler.is_classifier else None
    kinds = frozenset(
        part.kind for weight in weights.values() if isinstance(weight, tuple) for part in weight
    )
    logger.info("%s runs by its own definition, and pools texts", spec.architecture)
    if decoder is not None:
        model = decoder(spec, weights, max_model_len, device)
        return LoadedPoolingModel(None, model, head, kinds)
    assert encoder is not None
    return LoadedPoolingModel(encoder(spec, weights), None, head, kinds)


def causal_name(architecture: str) -> str:
    """Return the name of the model that would generate with the same layers."""
    for end in _VARIANTS:
        if architecture.endswith(end):
            return architecture.removesuffix(end) + "ForCausalLM"
    return architecture
