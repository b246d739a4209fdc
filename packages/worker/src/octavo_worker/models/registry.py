"""From an architecture's name to its definition."""

from __future__ import annotations

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec
from octavo_worker.models.deepseek import DeepseekForCausalLM
from octavo_worker.models.gemma import GemmaForCausalLM
from octavo_worker.models.gpt2 import GPT2LMHeadModel
from octavo_worker.models.gpt_oss import GptOssForCausalLM
from octavo_worker.models.llama import LlamaForCausalLM
from octavo_worker.models.mixtral import MixtralForCausalLM, Qwen3MoeForCausalLM
from octavo_worker.models.model import ModelDefinition
from octavo_worker.models.opt import OPTForCausalLM
from octavo_worker.models.phi3 import Phi3ForCausalLM

MODELS: dict[str, type[ModelDefinition]] = {
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "Gemma2ForCausalLM": GemmaForCausalLM,
    "Gemma3ForCausalLM": GemmaForCausalLM,
    "Gemma3ForConditionalGeneration": GemmaForCausalLM,  # its language model
    "GemmaForCausalLM": GemmaForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "GptOssForCausalLM": GptOssForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def has_definition(spec: ModelSpec) -> bool:
    """Whether there is a class that computes `spec`; others run through transformers."""
    return spec.architecture in MODELS


def resolve_model_class(spec: ModelSpec) -> type[ModelDefinition]:
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
