"""Model definitions, by architecture name."""

from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart
from octavo_worker.models.model import Model, ModelDefinition
from octavo_worker.models.registry import has_definition, resolve_model_class

__all__ = [
    "KVCache",
    "Model",
    "ModelDefinition",
    "WeightEntry",
    "WeightPart",
    "has_definition",
    "resolve_model_class",
]
