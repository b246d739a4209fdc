"""Settings: which model, and in which shape it is served."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo_core.config.field_types import TOKENS, PositiveInt


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and in which shape it is served."""

    model: Annotated[
        str,
        Meta(description="Folder, .gguf file or hub id; empty means the built-in starter model."),
    ] = ""
    served_model_name: Annotated[
        str | None, Meta(description="Name in the API; by default the model as it was given.")
    ] = None
    revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of a model from the hub.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Type of activations, and of weights that are not quantized; auto is "
            "float32 on a CPU."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "q8_0", "q4_0", "w8a8"],
        Meta(
            description="How a CPU keeps weights: auto as they are in the file, none unpacked to "
            "dtype (exact, slow, and up to seven times as large), or quantized while they load."
        ),
    ] = "auto"
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(
            description="What the model is for: generate makes text, pooling makes embeddings or "
            "scores; auto goes by its architecture and by what sentence-transformers has written."
        ),
    ] = "auto"
    pooling_type: Annotated[
        Literal["auto", "last", "mean", "cls"],
        Meta(
            description="Which tokens make the vector of a text, with --runner pooling; auto is "
            "what the model's files say."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(
            description="auto reads safetensors or GGUF, as the model has them; dummy makes random "
            "weights, to measure a model of which only config.json and tokenizer are there."
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        Meta(description="Launch each kernel of a decode step, and capture no graphs of it."),
    ] = False
    max_model_len: Annotated[
        PositiveInt | Literal["auto"] | None,
        Meta(
            description="Most tokens of prompt and answer; auto takes as many as the KV cache "
            "holds; by default what the model states.",
            extra=TOKENS,
        ),
    ] = None
