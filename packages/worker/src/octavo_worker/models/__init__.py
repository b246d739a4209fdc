"""Model definitions, by architecture name."""

from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart
from octavo_worker.models.model import Model
from octavo_worker.models.registry import resolve_model_class
from octavo_worker.models.runnable_model import RunnableModel

__all__ = [
    "KVCache",
    "Model",
    "RunnableModel",
    "WeightEntry",
    "WeightPart",
    "resolve_model_class",
]
