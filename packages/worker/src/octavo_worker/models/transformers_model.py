"""Any other causal language model, as transformers has it, over our paged KV cache.

transformers calls attention through an interface that others may fill: ours writes keys and values
to the cache and attends to the request's own blocks, so that a flat batch of many requests is
one row of tokens to the model. Only code of transformers itself is run, never a checkpoint's.

transformers is imported here alone, and only when such a model is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec
from octavo_kernels import AttentionMetadata, paged_attention, write_kv_cache
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.loading.finite import check_finite
from octavo_worker.loading.room import require_room
from octavo_worker.loading.safetensors import SafetensorsCheckpoint

ATTENTION = "octavo"
INSTALL = "pip install 'octavo-worker[transformers]'"


class _Step(NamedTuple):
    """What attention has to know of a step."""

    kv_caches: Sequence[KVCache]
    metadata: Sequence[AttentionMetadata]


class _Here:
    """Where a model's attention finds the step that is computed.

    Attributes:
        num_calls: How many layers have attended in this step.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.step: _Step | None = None
        self.num_calls = 0


class TransformersModel:
    """A model of transformers.

    Args:
        spec: Hyper-parameters.
        path: The model's folder.
        dtype: Type of weights and activations.
        device: Where the model is to run.
        is_dummy: Whether its weights are to be random.

    Raises:
        ModelError: transformers is not installed or doesn't know the model, the model's
            attention can't be replaced, or a file or tensor is missing or damaged.
        ConfigError: The weights are larger than what is free.
    """

    def __init__(
        self,
        spec: ModelSpec,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_dummy: bool = False,
    ) -> None:
        transformers = _import_transformers(spec)
        _check_supported(spec, path)
        model_class = _model_class(transformers, spec)
        transformers.AttentionInterface.register(ATTENTION, _attend)
        if not is_dummy:
            _check_files(path, dtype, device)
        make = _make_random if is_dummy else _load
        self._model = make(model_class, spec, path, dtype).to(device)
        if "position_ids" not in inspect.signature(self._model.base_model.forward).parameters:
            raise ModelError(
                f"architecture {spec.architecture!r} is not supported: it takes no "
                f"positions, which are what tells apart the requests of a batch.",
                field="architectures",
            )
        self._output_class = transformers.modeling_outputs.BaseModelOutputWithPast
        self._here = _Here(spec)
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                module.octavo_here = self._here

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute the last hidden states, ``[num_tokens, hidden_size]``."""
        self._here.step, self._here.num_calls = _Step(kv_caches, metadata), 0
        try:
            output = self._model.base_model(
                input_ids=input_ids.long().unsqueeze(0),
                position_ids=positions.long().unsqueeze(0),
                use_cache=False,
            )
        finally:
            self._here.step = None
        if self._here.num_calls != len(kv_caches):
            # Found out by the first step, which is the engine's own, before any request.
            raise ModelError(
                f"architecture {self._here.spec.architecture!r} is not supported: "
                f"{self._here.num_calls} of its {len(kv_caches)} layers let transformers' "
                f"attention be replaced.",
                field="architectures",
            )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from ``[num_rows, hidden_size]``.

        What a model does between its last layer and its logits (scales, bounds) stands in its
        own forward pass, which runs here with the layers left out.
        """
        base = self._model.base_model
        output = self._output_class(last_hidden_state=hidden_states.unsqueeze(0))
        base.forward = lambda *args, **kwargs: output
        try:
            no_tokens = torch.zeros(
                1, len(hidden_states), dtype=torch.long, device=hidden_states.device
            )
            logits: Tensor = self._model(input_ids=no_tokens, use_cache=False).logits
        finally:
            del base.forward
        return logits.squeeze(0).float()


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it: one row, which is our flat batch.

    Args:
        module: The layer's attention.
        query: ``[1, num_heads, num_tokens, head_dim]``.
        key: ``[1, num_kv_heads, num_tokens, head_dim]``.
        value: Like `key`.
        attention_mask: Not used; each token sees its own request's tokens up to itself.
        scaling: Factor of the scores.
        sliding_window: Positions that a token sees.
        softcap: Bound of the scores.
        s_aux: ``[num_heads]``, sinks.
        others: Dropout, and what does not concern attention.

    Returns:
        ``[1, num_tokens, num_heads, head_dim]``, and no weights.
    """
    here: _Here = module.octavo_here
    assert here.step is not None
    here.num_calls += 1
    layer = here.spec.layers[module.layer_idx]
    kv_cache, metadata = (part[module.layer_idx] for part in here.step)
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    if key.shape[1:] != (layer.num_kv_heads, layer.head_dim_k):
        raise ModelError(
            f"layer {module.layer_idx} of {here.spec.architecture} has keys of "
            f"{list(key.shape[1:])} a token, but the plan has "
            f"{[layer.num_kv_heads, layer.head_dim_k]}; it is not supported."
        )
    if layer.window is not None and sliding_window not in (None, layer.window):
        raise ModelError(
            f"layer {module.layer_idx} of {here.spec.architecture} has a window of "
            f"{sliding_window} tokens, but the plan has {layer.window}; it is not supported."
        )
    write_kv_cache(
        key.contiguous(), value.contiguous(), kv_cache.key, kv_cache.value, metadata.slot_mapping
    )
    attended = paged_attention(
        query.contiguous(),
        kv_cache.key,
        kv_cache.value,
        metadata,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or layer.window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return attended.unsqueeze(0), None


def _import_transformers(spec: ModelSpec) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"architecture {spec.architecture!r} has no definition of its own here; it can run "
            f"through transformers, which is not installed: {INSTALL}.",
            field="architectures",
        ) from error
    module: ModuleType = transformers
    return module


def _check_supported(spec: ModelSpec, path: Path) -> None:
    if not path.is_dir():
        raise ModelError(
            f"{path}: architecture {spec.architecture!r} is not supported in this format; use a "
            f"folder with safetensors files.",
            field="architectures",
        )
    if any(layer.kind not in ("full", "sliding") for layer in spec.layers):
        raise ModelError(
            f"{spec.architecture} keeps something else than keys and values of each token, "
            f"which is not supported.",
            field="architectures",
        )


def _model_class(transformers: ModuleType, spec: ModelSpec) -> Any:
    """Find a class of transformers itself: code that comes with a model is never run."""
    auto = transformers.models.auto.modeling_auto
    if spec.architecture not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ModelError(
            f"architecture {spec.architecture!r} is not supported: transformers "
            f"{transformers.__version__} has no causal language model of that name, and code that "
            f"comes with a model (auto_map) is never run.",
            field="architectures",
        )
    return getattr(transformers, spec.architecture)


def _make_random(model_class: Any, spec: ModelSpec, path: Path, dtype: torch.dtype) -> Any:
    """Make a model with the weights that it would be trained from."""
    config = model_class.config_class.from_pretrained(path, local_files_only=True)
    return model_class._from_config(config, dtype=dtype, attn_implementation=ATTENTION).eval()


def _check_files(path: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse damaged and missing files by name, and weights that do not fit with the numbers."""
    with closing(SafetensorsCheckpoint(path)) as checkpoint:
        num_bytes = dtype.itemsize * sum(
            math.prod(checkpoint.shape(name)) for name in checkpoint.names
        )
    for where in {torch.device("cpu"), device}:  # transformers loads on the host first
        require_room(num_bytes, where, "use a smaller --dtype or a smaller model")


def _load(model_class: Any, spec: ModelSpec, path: Path, dtype: torch.dtype) -> Any:
    try:
        model, info = model_class.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().rstrip(".")
        raise ModelError(
            f"{path}: transformers can't load {spec.architecture}: {reason}.", field="architectures"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{path}: tensor {missing[0]} is missing.", field=missing[0])
    for name, parameter in model.named_parameters():
        check_finite(parameter, name, str(path))
    return model.eval()
