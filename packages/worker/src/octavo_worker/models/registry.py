"""From an architecture's name to its definition."""

from __future__ import annotations

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec
from octavo_worker.models.llama import LlamaForCausalLM
from octavo_worker.models.model import Model

MODELS: dict[str, type[Model]] = {"LlamaForCausalLM": LlamaForCausalLM}


def resolve_model_class(spec: ModelSpec) -> type[Model]:
    """Return the class that computes `spec`.

    Raises:
        ModelError: There is none; the message lists those there are.
    """
    try:
        return MODELS[spec.architecture]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ModelError(
            f"architecture {spec.architecture!r} is not supported; supported: {known}.",
            field="architectures",
        ) from None
